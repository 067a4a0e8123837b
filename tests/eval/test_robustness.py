"""Next-token distributions, by hand and of tiny models, and models compared on pairs of texts."""

import math

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from prismlm.errors import InputError
from prismlm.eval.pairs import Pair, read_pairs
from prismlm.eval.robustness import (
    MEASURES,
    OpenedModel,
    encode,
    jensen_shannon,
    last_logits,
    log_probabilities,
    logits_on_disk,
    matching_temperature,
    mean_entropy,
    measure_robustness,
    rank_correlation,
    same_top,
    top_overlap,
)
from prismlm.models.checkpoint import read_checkpoint

KINDS = ("protot", "llama", "gpt2", "mamba")


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        # H(¾, ¼) − ½ H(½, ½) − ½ H(1, 0), in bits
        ((0.5, 0.5), (1, 0), -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5),
        ((1, 0), (0.5, 0.5), 0.311278),
        ((0, 1), (1, 0), 1),
        ((0.5, 0.5), (0.5, 0.5), 0),
    ],
)
def test_divergence_by_hand(p, q, expected):
    js = jensen_shannon(log(*p), log(*q))
    assert float(js) == pytest.approx(expected, abs=1e-6)


def test_ranks_by_hand():
    p, q = log(0.4, 0.3, 0.2, 0.1), log(0.1, 0.3, 0.35, 0.25)
    assert float(top_overlap(p, q, 2)) == 0.5
    assert float(top_overlap(p, q, 10)) == 1
    assert float(same_top(p, q)) == 0
    assert float(same_top(p, p)) == 1
    # Ranks 4 3 2 1 and 1 3 4 2: 1 − 6 (9 + 0 + 4 + 1) / (4 · 15)
    assert float(rank_correlation(p, q)) == pytest.approx(-0.4)
    # Of the top two of either, tokens 0, 1 and 2: ranks 3 2 1 and 1 2 3.
    assert float(rank_correlation(p, q, 2)) == pytest.approx(-1)


def test_a_temperature_gives_the_target_entropy():
    logits = np.random.default_rng(0).normal(size=(100, 9)).astype(np.float32)
    rows = np.arange(0, 100, 2)
    for target in (0.3, 1.2, 2.0):
        temperature = matching_temperature(logits, rows, target)
        assert mean_entropy(logits, rows, temperature) == pytest.approx(target, abs=1e-5)
    current = mean_entropy(logits, rows)
    assert matching_temperature(logits, rows, current) == 1
    # More than ln 9.
    with pytest.raises(InputError, match="no temperature"):
        matching_temperature(logits, rows, 2.5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_batch_equal_those_of_single_texts(studied, kind):
    model, tokenizer = read_checkpoint(studied / kind)
    sentence = "A teacher describes the names of birds."
    rows = encode(model, tokenizer, ["The river", sentence, "Old maps", "The river c"])
    counts = []
    logits = logits_on_disk(model, [*rows, []], counts.append)
    assert sum(counts) == 4
    assert not logits[4].any()
    for row, ids in zip(logits, rows, strict=False):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert np.allclose(row, expected, atol=1e-5)


def test_texts_get_the_tokenizers_prefix_but_not_its_suffix(studied):
    model, tokenizer = read_checkpoint(studied / "llama")
    (plain,) = encode(model, tokenizer, ["The river"])
    assert plain == tokenizer("The river", add_special_tokens=False)["input_ids"]
    name, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A {name}", special_tokens=[(name, number)]
    )
    assert tokenizer("The river")["input_ids"] == [number, *plain, number]
    assert encode(model, tokenizer, ["The river", ""]) == [[number, *plain], []]


# -- models compared


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
