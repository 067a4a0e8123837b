"""Routing of a text clamped onto its variant."""

import math

import numpy as np
import pytest
import torch

from prismlm.eval.clamping import (
    Divergences,
    align,
    measure_clamping,
    random_text,
    routing_of,
    slice_mediation,
)
from prismlm.eval.pairs import read_pairs
from prismlm.eval.robustness import OpenedModel, encode, last_logits, measure_robustness
from prismlm.models.checkpoint import read_checkpoint


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("prismlm.statistics.RESAMPLES", 100)


def open_model(studied, kind):
    return OpenedModel(kind, *read_checkpoint(studied / kind))


def test_mediation_by_hand():
    results = [
        Divergences("typo", 0.4, 0.3, 0.5, True),
        Divergences("typo", 0.2, 0.3, math.nan, False),
        Divergences("typo", 0.00009, 0.5, 0.5, True),
    ]
    row = slice_mediation("typo", results, ["typo", "synonym", "typo"])
    counts = ("pairs", "of_equal_length", "unaligned", "below_floor")
    assert [row[name] for name in counts] == [2, 1, 2, 1]
    clamped, control = row["clamped"], row["control"]
    # PMR is 0.25 and −0.5.
    values = [clamped[name].value for name in ("base", "mean", "pooled", "js")]
    assert values == pytest.approx([0.3, -0.125, 0, 0.3])
    assert clamped["deviation"] == pytest.approx(0.75 / math.sqrt(2))
    assert (clamped["share_positive"], clamped["unmoved"], control["pairs"]) == (0.5, 0, 1)
    assert control["mean"].value == pytest.approx(-0.25)
    assert row["gain"].value == pytest.approx(0.2)
    rounding = slice_mediation("typo", [Divergences("typo", 0.4, 0.4 - 1e-7, 0.2, True)], [])
    assert (rounding["clamped"]["unmoved"], rounding["clamped"]["share_positive"]) == (1, 0)
    empty = slice_mediation("typo", results[2:], [])
    assert (empty["pairs"], empty["below_floor"]) == (0, 1)
    assert empty["clamped"] is empty["gain"] is None


@pytest.mark.parametrize(
    ("original", "changed", "alignment"),
    [
        # Equal length: by position.
        ([1, 2, 3], [1, 9, 3], [0, 1, 2]),
        ([5], [6], [0]),
        # An inserted token has no counterpart, a removed one is skipped.
        ([1, 2, 3], [1, 7, 2, 3], [0, -1, 1, 2]),
        ([1, 2, 3, 4], [1, 3, 4], [0, 2, 3]),
        # A word of more tokens ends where it ended.
        ([1, 2, 3], [1, 7, 8, 3], [0, -1, 1, 2]),
        ([1, 7, 8, 3], [1, 2, 3], [0, 2, 3]),
        # Nothing is unchanged; two of five have a counterpart, and two of four.
        ([1, 2], [3, 4, 5], None),
        ([1, 2], [1, 7, 8, 9, 2], None),
        ([1, 2], [1, 7, 8, 2], [0, -1, -1, 1]),
    ],
)
def test_alignment_by_hand(original, changed, alignment):
    assert align(original, changed) == alignment


def test_a_control_is_as_long_as_the_original_or_the_next_longer():
    texts, generator = [[1] * 3, [2] * 5, [3] * 5, [4] * 7], np.random.default_rng(0)
    assert {tuple(random_text(texts, 4, generator)) for _ in range(20)} == {(2,) * 5, (3,) * 5}
    assert random_text(texts, 3, generator) == [1] * 3
    assert random_text(texts, 8, generator) is None


@pytest.mark.parametrize(
    ("kind", "routing"), [("protot", "channels"), ("llama", "attention"), ("gpt2", "attention")]
)
def test_every_kind_of_routing_is_clamped(studied, kind, routing):
    model, pairs = open_model(studied, kind), read_pairs(studied / "pairs.parquet")
    result = measure_clamping(model, pairs)
    assert result["routing"] == routing
    names = [part["name"] for part in result["slices"]]
    assert names == ["synonym", "typo", "punctuation", "negation"]
    bases = measure_robustness([model], pairs)["slices"]
    for part, robustness in zip(result["slices"], bases, strict=True):
        left_out = part["unaligned"] + part["below_floor"]
        assert part["pairs"] + left_out == robustness["pairs"]
        js, base = part["clamped"]["js"].value, part["clamped"]["base"].value
        assert js != base != part["control"]["js"].value
        if not left_out:
            assert base == pytest.approx(robustness["models"][kind]["js"].value)
        assert part["clamped"]["pooled"].value == pytest.approx(1 - js / base)
    # "ZQ" has nothing in common with its original.
    assert [part["unaligned"] for part in result["slices"]] == [0, 0, 0, 1]
    assert 0 < sum(part["of_equal_length"] for part in result["slices"]) < 24
    assert measure_clamping(model, pairs) == result


@pytest.mark.parametrize("kind", ["protot", "llama"])
def test_a_texts_own_routing_changes_nothing_and_anothers_does(studied, kind):
    _, model, tokenizer = open_model(studied, kind)
    texts = ["The river carries letters in a box.", "The council forgets letters in a box."]
    text, other = encode(model, tokenizer, texts)
    ids, alignment = torch.tensor([text]), list(range(len(text)))
    before = last_logits(model, ids)
    _, clamp = routing_of(model)
    with clamp(text, alignment):
        assert torch.allclose(last_logits(model, ids), before, atol=1e-5)
    with clamp(other, alignment):
        assert (last_logits(model, ids) - before).abs().max() > 1e-2
