"""What a lens says of the text it was built from."""

import numpy as np
import pytest

from prismlm.lens.inspection import inspect_lens, verdict


@pytest.mark.parametrize(
    ("converged_at", "filled", "enough", "begins"),
    [
        (0.5, 4, True, "Enough text"),
        (0.51, 4, False, "Not enough text"),
        (0.5, 3, False, "Not enough text"),
    ],
)
def test_a_lens_says_whether_it_had_enough_text(converged_at, filled, enough, begins):
    found, said = verdict(converged_at, 4, filled, 2)
    assert found is enough
    assert said.startswith(begins)


def test_a_lens_says_what_licences_its_text_has(lm):
    lens = lm.lens
    found = {one["license"]: one["share"] for one in inspect_lens(lens)["licenses"]}
    records = lens.cells.records(np.arange(len(lens.cells)))
    document = lens.cells.document_of(records["position"])
    of_row = [lens.cells.facts(int(number))["license"] or "(unknown)" for number in document]
    assert found == pytest.approx({name: of_row.count(name) / len(of_row) for name in set(of_row)})
    assert list(found.values()) == sorted(found.values(), reverse=True)
