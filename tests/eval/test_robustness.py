"""Models compared on pairs of texts."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.eval.next_token import encode, jensen_shannon, last_logits, log_probabilities
from prismlm.eval.pairs import Pair, read_pairs
from prismlm.eval.robustness import MEASURES, OpenedModel, measure_robustness
from prismlm.models.checkpoint import read_checkpoint

KINDS = ("protot", "llama", "gpt2", "mamba")


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prismlm.statistics.RESAMPLES", 100)
        yield


@pytest.fixture(scope="module")
def models(studied):
    return [OpenedModel(kind, *read_checkpoint(studied / kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def pairs(studied):
    return read_pairs(studied / "pairs.parquet")


@pytest.fixture(scope="module")
def result(models, pairs):
    return measure_robustness(models, pairs)


def test_every_slice_has_figures_of_each_model_and_differences(result):
    assert [(part["name"], part["pairs"]) for part in result["slices"]] == [
        ("synonym", 6), ("typo", 6), ("punctuation", 6), ("negation", 7),
    ]  # fmt: skip
    for part in result["slices"]:
        assert tuple(part["models"]) == KINDS
        assert len(part["differences"]) == 6
        for figures in part["models"].values():
            assert set(figures) == set(MEASURES)
            assert 0 < figures["js"].low <= figures["js"].value <= figures["js"].high < 1
        for figures in part["differences"]:
            first, second = (part["models"][name] for name in figures["of"])
            for key in MEASURES:
                difference = first[key].value - second[key].value
                assert figures[key].value == pytest.approx(difference)
    assert result["slices"][0]["differences"][0]["of"] == ["protot", "llama"]
    assert result["comparable"]
    assert not result["left_out"]


def test_a_slices_js_is_the_mean_over_its_pairs(result, models, pairs):
    name, model, tokenizer = models[1]

    def distribution(text):
        ids = torch.tensor(encode(model, tokenizer, [text]))
        return log_probabilities(last_logits(model, ids))

    js = [
        jensen_shannon(distribution(pair.original), distribution(pair.perturbed)).item()
        for pair in pairs
        if pair.slice == "typo"
    ]
    assert result["slices"][1]["models"][name]["js"].value == pytest.approx(np.mean(js), rel=1e-4)


def test_entropies_are_matched_to_the_lowest(result):
    entropies = {model["name"]: model["entropy"] for model in result["models"]}
    assert result["target"] == min(entropies.values())
    for model in result["models"]:
        assert (model["temperature"] == 1) == (model["entropy"] == result["target"])
        assert model["temperature"] <= 1
    sharpest = min(entropies, key=entropies.get)
    for part in result["slices"]:
        assert part["models"][sharpest]["js"] == part["models"][sharpest]["js_matched"]


def test_a_pair_that_one_model_cannot_read_is_left_out_for_all(models, pairs):
    long = Pair("x", "typo", "river " * 70, "rivers " * 70)
    result = measure_robustness(models, [*pairs, long])
    assert result["left_out"] == 1
    assert result["slices"][1]["pairs"] == 6
    # The Llama alone reads it.
    assert measure_robustness(models[1:2], [long])["slices"][0]["pairs"] == 1


@pytest.mark.parametrize(
    ("kinds", "entropy", "message"),
    [
        ([1, 1], None, "two models are called llama"),
        ([0], 50.0, r"no temperature .* expected between"),
        ([], None, "nothing to compare"),
    ],
)
def test_bad_input_is_refused(models, pairs, kinds, entropy, message):
    with pytest.raises(InputError, match=message):
        measure_robustness([models[kind] for kind in kinds], pairs[:2], entropy=entropy)
