"""What a claim is answered with."""

import pytest

from benchmarks.pages.signal_noise_attention import verdict


@pytest.mark.parametrize(
    ("effects", "ps", "expected", "answer"),
    [
        ([0.5, 0.3], [0.01, 0.04], 1, "**yes, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], 1, "**no: the opposite, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], -1, "**yes, in every seed**"),
        ([0.5, -0.3], [0.01, 0.04], 1, "not shown"),
        ([0.5, 0.3], [0.01, 0.06], 1, "not shown"),
        ([0.5], [0.01], 1, "yes, in the one seed there is"),
    ],
)
def test_a_claim_holds_where_every_seed_has_its_sign(effects, ps, expected, answer):
    assert verdict(effects, ps, expected) == answer
