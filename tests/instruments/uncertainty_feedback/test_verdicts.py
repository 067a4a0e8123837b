"""What each check says of figures that are made up for it."""

import pytest

from prismlm.instruments.uncertainty_feedback import (
    Ablated,
    Ablation,
    AfterMistake,
    AttentionProbe,
    CodeProbe,
    Hedging,
    HedgingRun,
    LayerAttention,
    LayerProbe,
    Mistakes,
)
from prismlm.statistics import Interval

NONE, MORE, LESS = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3), Interval(-0.2, -0.3, -0.1)


@pytest.mark.parametrize(
    ("zero", "shuffled", "codes", "said"),
    [
        (MORE, MORE, 9, "Which code a token gets matters"),
        (MORE, NONE, 9, "says only that a vector is expected there"),
        (NONE, NONE, 9, "No sign that it uses the signal"),
        (MORE, LESS, 9, "for the better"),
        (MORE, NONE, 1, "Says nothing"),
    ],
)
def test_ablation(zero, shuffled, codes, said):
    changes = (("zero", zero), ("neutral", NONE), ("shuffled", shuffled))
    conditions = tuple(Ablated(name, 2.0, 7.4, change, change) for name, change in changes)
    verdict = Ablation(12, 100, codes, 2.0, 7.4, conditions).verdict
    assert said in verdict
    assert ("matters" in verdict) == (shuffled is MORE and codes > 1)
    assert "12 texts" in verdict or codes == 1


@pytest.mark.parametrize(
    ("correlation", "q", "added", "said"),
    [
        (0.3, 0.01, MORE, "the signal itself adds to it in 1, at most +0.200 [+0.100, +0.300]"),
        (0.3, 0.01, NONE, "the text makes it and not the signal"),
        (0.3, 0.2, MORE, "No later layer"),
        (-0.3, 0.01, LESS, "No later layer"),
    ],
)
def test_attention(correlation, q, added, said):
    early = LayerAttention(0, 1, 1, 0, 1, 1, 0.9, 0.001, 0.001, 0, MORE)
    late = LayerAttention(1, 1, 1, 0, 1, 1, correlation, q, q, 0, added)
    assert said in AttentionProbe(9, 30, 20, 0, (early, late), 9).verdict


def test_the_layer_that_is_named_is_one_that_is_counted():
    layers = [
        LayerAttention(number, 1, 1, 0, 1, 1, correlation, q, q, 0, NONE)
        for number, (correlation, q) in enumerate([(0, 1), (0, 1), (0.5, 0.2), (0.2, 0.01)])
    ]
    verdict = AttentionProbe(9, 30, 20, 0, tuple(layers), 9).verdict
    assert "1 of 2 later layers" in verdict
    assert "at most with a rank correlation of +0.200, layer 3" in verdict


@pytest.mark.parametrize(
    ("change", "shuffled", "hedges", "said"),
    [
        (MORE, MORE, 4, "Its signal makes it hedge more"),
        (MORE, NONE, 4, "does not beat both controls"),
        (NONE, MORE, 4, "does not beat both controls"),
        (LESS, LESS, 4, "does not beat both controls"),
        (None, None, 4, "entropies do not differ"),
        (MORE, None, 4, "entropies do not differ"),
        (NONE, NONE, 0, "no hedging word was written"),
    ],
)
def test_hedging_must_beat_both_controls(change, shuffled, hedges, said):
    run = HedgingRun(100, hedges, 50, 0.1, 0.1, NONE)
    assert said in Hedging(9, 8, 1.0, run, run, run, change, shuffled).verdict


def test_codes_that_are_all_the_same_are_no_negative_finding():
    layer = LayerAttention(0, 1, 1, 0, 1, 1, 0.0, 1.0, 1.0, 0, NONE)
    nothing = "Says nothing: all own codes are the same"
    assert AttentionProbe(9, 30, 20, 0, (layer,), 1).verdict.startswith(nothing)
    once = AfterMistake("own", (0.1,), (0.5,), NONE, MORE, None)
    recovery = Mistakes(9, 4, 0.1, (once,), NONE, NONE, NONE, NONE, 1)
    assert recovery.verdict.startswith(nothing)
    nan = Interval(*[float("nan")] * 3)
    probed = (
        LayerProbe(0, 0.0, nan, nan, nan, nan, NONE),
        LayerProbe(1, 1.0, MORE, nan, *[NONE] * 3),
    )
    assert CodeProbe(8, 4, 500, 2 / 3, probed, 1).verdict.startswith(nothing)
    found = CodeProbe(8, 4, 500, 2 / 3, probed, 2)
    assert found.peak.layer == 1
    assert found.verdict.startswith("Says nothing: R² is no number")


@pytest.mark.parametrize(
    ("zero", "shuffled", "helps"),
    [(LESS, LESS, True), (LESS, NONE, False), (NONE, LESS, False), (MORE, MORE, False)],
)
def test_mistakes_must_beat_both_controls(zero, shuffled, helps):
    one = AfterMistake("own", (0.1, 0.0), (0.5, 0.2), NONE, MORE, None)
    verdict = Mistakes(9, 4, 0.1, (one,), zero, shuffled, NONE, NONE, 30).verdict
    assert verdict.startswith("With its signal a mistake costs it less") == helps
    assert "over 2 tokens" in verdict


def test_probe():
    def layer(number, code, added):
        found = Interval(code, code - 0.05, code + 0.05)
        return LayerProbe(number, number / 3, found, NONE, NONE, added, NONE)

    def verdict(*layers):
        return CodeProbe(8, 4, 500, 2 / 3, layers, 9).verdict

    peak = verdict(
        layer(0, 0.3, NONE), layer(1, 0.4, NONE), layer(2, 0.6, MORE), layer(3, 0.5, NONE)
    )
    assert "depth 0.67 (layer 2 of 3; about 0.67 is expected), R² 0.600" in peak
    assert "more than the text alone tells" in peak
    assert "the text tells it as well" in verdict(layer(0, 0.3, MORE), layer(1, 0.4, NONE))
    assert "No layer" in verdict(layer(0, 0.0, NONE), layer(1, 0.04, NONE))
