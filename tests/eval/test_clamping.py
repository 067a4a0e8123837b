"""Routing of a text clamped onto its variant."""

import math

import numpy as np
import pytest
import torch

from prismlm.eval.clamping import (
    Clamped,
    align,
    measure_clamping,
    random_text,
    routing_of,
    slice_mediation,
)
from prismlm.eval.next_token import encode, logits_after
from prismlm.eval.pairs import read_pairs
from prismlm.eval.robustness import OpenedModel, measure_robustness
from prismlm.models.checkpoint import read_checkpoint


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("prismlm.statistics.RESAMPLES", 100)


def opened(studied, kind):
    return OpenedModel(kind, *read_checkpoint(studied / kind))


@pytest.fixture(scope="module")
def pairs(studied):
    return read_pairs(studied / "pairs.parquet")


def test_mediation_by_hand():
    found = [
        Clamped("typo", 0.4, 0.3, 0.5, True),
        Clamped("typo", 0.2, 0.3, math.nan, False),
        Clamped("typo", 0.00009, 0.5, 0.5, True),
    ]
    part = slice_mediation("typo", found, ["typo", "synonym", "typo"])
    counts = ("pairs", "of_equal_length", "unaligned", "below_floor")
    assert [part[name] for name in counts] == [2, 1, 2, 1]
    assert part["clamped"]["base"].value == pytest.approx(0.3)
    # PMR is 0.25 and −0.5.
    assert part["clamped"]["mean"].value == pytest.approx(-0.125)
    assert part["clamped"]["deviation"] == pytest.approx(0.75 / math.sqrt(2))
    assert part["clamped"]["share_positive"] == 0.5
    assert part["clamped"]["pooled"].value == pytest.approx(0)
    assert part["clamped"]["js"].value == pytest.approx(0.3)
    assert (part["clamped"]["unmoved"], part["control"]["pairs"]) == (0, 1)
    assert part["control"]["mean"].value == pytest.approx(-0.25)
    assert part["gain"].value == pytest.approx(0.2)
    still = slice_mediation("typo", [Clamped("typo", 0.4, 0.4 - 1e-7, 0.2, True)], [])
    assert (still["clamped"]["unmoved"], still["clamped"]["share_positive"]) == (1, 0)
    empty = slice_mediation("typo", found[2:], [])
    assert (empty["pairs"], empty["below_floor"]) == (0, 1)
    assert empty["clamped"] is empty["gain"] is None


@pytest.mark.parametrize(
    ("changed", "text", "counterparts"),
    [
        # Of one length: position by position.
        ([1, 2, 3], [1, 9, 3], [0, 1, 2]),
        ([5], [6], [0]),
        # An inserted token has none, a removed one is passed over.
        ([1, 2, 3], [1, 7, 2, 3], [0, -1, 1, 2]),
        ([1, 2, 3, 4], [1, 3, 4], [0, 2, 3]),
        # A word of more pieces ends where it ended.
        ([1, 2, 3], [1, 7, 8, 3], [0, -1, 1, 2]),
        ([1, 7, 8, 3], [1, 2, 3], [0, 2, 3]),
        # Nothing is the same; two of five have a counterpart, and two of four.
        ([1, 2], [3, 4, 5], None),
        ([1, 2], [1, 7, 8, 9, 2], None),
        ([1, 2], [1, 7, 8, 2], [0, -1, -1, 1]),
    ],
)
def test_counterparts_of_tokens_by_hand(changed, text, counterparts):
    assert align(changed, text) == counterparts


def test_a_control_is_as_long_as_the_original_where_there_is_one():
    others, generator = [[1] * 3, [2] * 5, [3] * 5, [4] * 7], np.random.default_rng(0)
    assert {tuple(random_text(others, 4, generator)) for _ in range(20)} == {(2,) * 5, (3,) * 5}
    assert random_text(others, 3, generator) == [1] * 3
    assert random_text(others, 8, generator) is None


@pytest.mark.parametrize(
    ("kind", "routing"), [("protot", "channels"), ("llama", "attention"), ("gpt2", "attention")]
)
def test_a_model_of_each_kind(studied, pairs, kind, routing):
    model = opened(studied, kind)
    found = measure_clamping(model, pairs)
    assert found["routing"] == routing
    assert [part["name"] for part in found["slices"]] == [
        "synonym",
        "typo",
        "punctuation",
        "negation",
    ]
    bases = measure_robustness([model], pairs)["slices"]
    for part, base in zip(found["slices"], bases, strict=True):
        assert part["pairs"] + part["unaligned"] + part["below_floor"] == base["pairs"]
        assert (
            part["clamped"]["js"].value
            != part["clamped"]["base"].value
            != part["control"]["js"].value
        )
        if not part["unaligned"] + part["below_floor"]:
            assert part["clamped"]["base"].value == pytest.approx(base["models"][kind]["js"].value)
        figures = part["clamped"]
        assert figures["pooled"].value == pytest.approx(
            1 - figures["js"].value / part["clamped"]["base"].value
        )
    # "ZQ" has nothing of its original.
    assert [part["unaligned"] for part in found["slices"]] == [0, 0, 0, 1]
    assert 0 < sum(part["of_equal_length"] for part in found["slices"]) < 24
    assert measure_clamping(model, pairs) == found


@pytest.mark.parametrize("kind", ["protot", "llama"])
def test_a_text_with_its_own_routing_is_itself_and_with_anothers_is_not(studied, kind):
    _, model, tokenizer = opened(studied, kind)
    texts = ["The river carries letters in a box.", "The council forgets letters in a box."]
    one, other = (torch.tensor(ids) for ids in encode(model, tokenizer, texts))
    before = logits_after(model, one[None])
    _, clamp = routing_of(model)
    own = list(range(len(one)))
    with clamp(one.tolist(), own):
        assert torch.allclose(logits_after(model, one[None]), before, atol=1e-5)
    with clamp(other.tolist(), own):
        assert (logits_after(model, one[None]) - before).abs().max() > 1e-2
