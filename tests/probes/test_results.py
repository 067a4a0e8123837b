"""Tables of figures, their findings, and how they are printed."""

import json
import math

import pytest
import torch

from prismlm.probes.results import Table, finding, text_of
from prismlm.statistics import Interval

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "clear", "effect"),
    [
        (Interval(0.2, 0.1, 0.3), True, "above 0"),
        (Interval(-0.2, -0.3, -0.1), True, "below 0"),
        (Interval(0.2, -0.1, 0.3), True, "may be chance"),
        (Interval(0.2, 0.1, 0.3), False, "may be chance"),
        (Interval(NAN, NAN, NAN), True, "undefined"),
        (None, True, "undefined"),
    ],
)
def test_an_effect_is_where_the_whole_interval_lies(value, clear, effect):
    assert finding("a − b", value, clear=clear)["effect"] == effect


def test_an_interval_is_printed_with_its_ends():
    assert text_of(Interval(-0.5, NAN, 1), "+.2f") == "−0.50 [–, +1.00]"


def test_a_table_becomes_json():
    rows = ({"layer": 0, "gain": Interval(0.1, NAN, 0.2)}, {"layer": 1, "x": torch.ones(2)})
    table = Table("Title", {"layer": ""}, rows, {"texts": 3})
    assert table["texts"] == 3
    value = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    gain = {"value": 0.1, "low": None, "high": 0.2}
    assert value == {"texts": 3, "rows": [{"layer": 0, "gain": gain}, {"layer": 1, "x": [1, 1]}]}
