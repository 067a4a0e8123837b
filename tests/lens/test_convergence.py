"""What a lens says of the text it was built from."""

import numpy as np
import pytest

import prismlm
from prismlm.lens.convergence import LensInspection, inspect_lens


def inspection(converged_at, filled):
    sizes = {"tokens": 1000, "documents": 10, "contexts": 8, "distinct_documents": 4}
    shares = dict.fromkeys(
        ["largest_document_share", "duplicate_share", "near_duplicate_share"], 0.5
    )
    figures = {"prototypes": 4, "with_contexts": 4, "in_use": 4, "kept": 2, "filled": filled}
    curve = {"convergence": [], "converged_at": converged_at, "spread": {}}
    return LensInspection(split="train", trained_on=True, **sizes, **shares, **figures, **curve)


@pytest.mark.parametrize(
    ("converged_at", "filled", "enough", "begins"),
    [
        (0.5, 4, True, "Enough text"),
        (0.51, 4, False, "Not enough text"),
        (0.5, 3, False, "Not enough text"),
        (None, 4, None, "Whether there was enough"),
    ],
)
def test_a_lens_says_whether_it_had_enough_text(converged_at, filled, enough, begins):
    found = inspection(converged_at, filled)
    assert found.enough is enough
    assert found.verdict.startswith(begins)


def test_prototypes_are_spread_over_sources_as_their_activation_is(tiny_model):
    lens = prismlm.load(tiny_model).lens
    spread = inspect_lens(lens).spread["effective_sources"]
    rows = lens.mass.to_pylist()
    for prototype in range(lens.num_prototypes):
        of_source = {}
        for row in rows:
            if row["prototype"] == prototype:
                amount = of_source.get(row["source"], 0) + row["activation_sum"]
                of_source[row["source"]] = amount
        shares = np.array([amount for amount in of_source.values() if amount])
        shares = shares / shares.sum()
        expected = np.exp(-(shares * np.log(shares)).sum()) if len(shares) else 0
        assert spread[prototype] == pytest.approx(expected)
