"""Tables of figures, their findings, how they are printed; texts that are too short."""

import json
import math

import pytest
import torch

from prismlm.corpus.documents import Document
from prismlm.errors import InputError
from prismlm.probes.results import Table, finding, text_of
from prismlm.probes.texts import document_sample
from prismlm.statistics import Interval

NAN = math.nan


@pytest.mark.parametrize(
    ("value", "clear", "effect"),
    [
        (Interval(-0.2, -0.3, -0.1), True, "below 0"),
        (Interval(0.2, -0.1, 0.3), True, "may be chance"),
        (Interval(0.2, 0.1, 0.3), False, "may be chance"),
        (Interval(NAN, NAN, NAN), True, "undefined"),
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


def test_texts_without_a_predicted_token_are_left_out(corpus):
    texts = [Document("0", "Old maps, the river."), Document("1", "e")]
    sample = document_sample(texts, corpus.tokenizer, texts=4, tokens=8)
    assert (len(sample.texts), sample.left_out) == (1, 1)
    with pytest.raises(InputError, match="the first token of a text is not predicted"):
        document_sample(texts[1:], corpus.tokenizer, texts=4, tokens=8)
