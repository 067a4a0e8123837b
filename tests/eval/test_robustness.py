"""Models compared on pairs of texts."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.eval.next_token import encode, jensen_shannon, log_probabilities, logits_after
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
def found(models, pairs):
    return measure_robustness(models, pairs)


def test_every_slice_model_and_pair_of_models_has_its_figures(found):
    assert [(part["name"], part["pairs"]) for part in found["slices"]] == [
        ("synonym", 6), ("typo", 6), ("punctuation", 6), ("negation", 7),
    ]  # fmt: skip
    for part in found["slices"]:
        assert tuple(part["models"]) == KINDS
        assert len(part["differences"]) == 6
        for figures in part["models"].values():
            assert set(figures) == set(MEASURES)
            assert 0 < figures["js"].low <= figures["js"].value <= figures["js"].high < 1
        for figures in part["differences"]:
            one, other = figures["of"]
            for key in MEASURES:
                interval = figures[key]
                apart = part["models"][one][key].value - part["models"][other][key].value
                assert interval.value == pytest.approx(apart)
    assert found["comparable"]
    assert not found["left_out"]
    assert found["slices"][0]["differences"][0]["of"] == ["protot", "llama"]
    assert found["unit"] == "bits"


def test_a_mean_is_that_of_its_pairs(found, models, pairs):
    name, model, tokenizer = models[1]
    several = [pair for pair in pairs if pair.slice == "typo"]
    own = [
        jensen_shannon(
            *(
                log_probabilities(
                    logits_after(model, torch.tensor(encode(model, tokenizer, [text])))
                )
                for text in (pair.original, pair.perturbed)
            )
        ).item()
        for pair in several
    ]
    assert found["slices"][1]["models"][name]["js"].value == pytest.approx(np.mean(own), rel=1e-4)


def test_the_flattest_model_is_sharpened_to_the_sharpest(found):
    entropies = {model["name"]: model["entropy"] for model in found["models"]}
    assert found["target"] == min(entropies.values())
    for model in found["models"]:
        assert (model["temperature"] == 1) == (model["entropy"] == found["target"])
        assert model["temperature"] <= 1
    sharpest = min(entropies, key=entropies.__getitem__)
    for part in found["slices"]:
        assert part["models"][sharpest]["js"] == part["models"][sharpest]["js_matched"]


def test_a_pair_that_one_model_cannot_read_is_left_out_for_all(models, pairs):
    long = Pair("x", "typo", "river " * 70, "rivers " * 70)
    found = measure_robustness(models, [*pairs, long])
    assert found["left_out"] == 1
    assert found["slices"][1]["pairs"] == 6
    # Alone, the Llama reads it.
    assert measure_robustness(models[1:2], [long])["slices"][0]["pairs"] == 1


def test_bad_input_is_refused(models, pairs):
    with pytest.raises(InputError, match="two models are called llama"):
        measure_robustness([models[1], models[1]], pairs[:2])
    with pytest.raises(InputError, match=r"no temperature .* expected between"):
        measure_robustness(models[:1], pairs[:2], entropy=50.0)
    with pytest.raises(InputError, match="nothing to compare"):
        measure_robustness([], pairs[:2])
