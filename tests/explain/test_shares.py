"""Shares as values."""

import pytest

from prismlm.explain.shares import DocumentShare, worth_showing


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        # By hand: at least 3 %, or half of the first where that has under 6 %.
        ([], 0),
        ([0.5, 0.04, 0.03, 0.029, 0.01], 3),
        ([0.06, 0.03, 0.0299], 2),
        ([0.04, 0.021, 0.02, 0.0199], 3),
        ([0.002, 0.0011, 0.0009], 2),
        ([0.0, 0.0], 2),
    ],
)
def test_documents_that_carry_far_less_than_others_are_not_worth_showing(shares, shown):
    documents = [
        DocumentShare(str(i), share, None, None, None, None, None, 0, lambda: None)
        for i, share in enumerate(shares)
    ]
    assert worth_showing(documents) == documents[:shown]
