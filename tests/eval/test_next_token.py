"""Next-token distributions, by hand and of tiny models."""

import math

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.eval import next_token
from prismlm.models.checkpoint import read_checkpoint


def rows(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_divergence_by_hand():
    p, q = rows([0.5, 0.5]), rows([1.0, 0.0])
    # H(¾, ¼) − ½ H(½, ½) − ½ H(1, 0), in bits
    expected = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5
    assert float(next_token.jensen_shannon(p, q)) == pytest.approx(expected, abs=1e-12)
    assert float(next_token.jensen_shannon(q, p)) == pytest.approx(0.311278, abs=1e-6)
    assert float(next_token.jensen_shannon(rows([0.0, 1.0]), q)) == pytest.approx(1)
    assert float(next_token.jensen_shannon(p, p)) == 0


def test_ranks_by_hand():
    p, q = rows([0.4, 0.3, 0.2, 0.1]), rows([0.1, 0.3, 0.35, 0.25])
    assert float(next_token.top_overlap(p, q, 2)) == 0.5
    assert float(next_token.top_overlap(p, q, 10)) == 1
    assert float(next_token.same_top(p, q)) == 0
    assert float(next_token.same_top(p, p)) == 1
    # Ranks 4 3 2 1 and 1 3 4 2: 1 − 6 (9 + 0 + 4 + 1) / (4 · 15)
    assert float(next_token.rank_correlation(p, q)) == pytest.approx(-0.4)
    # Of the top two of either, tokens 0, 1 and 2: ranks 3 2 1 and 1 2 3.
    assert float(next_token.rank_correlation(p, q, 2)) == pytest.approx(-1)


@pytest.mark.parametrize("target", [0.3, 1.2, 2.0])
def test_a_temperature_gives_the_entropy_that_is_asked_for(target):
    logits = np.random.default_rng(0).normal(size=(100, 9)).astype(np.float32)
    some = np.arange(0, 100, 2)
    temperature = next_token.matching_temperature(logits, some, target)
    assert next_token.mean_entropy(logits, some, temperature) == pytest.approx(target, abs=1e-5)
    own = next_token.mean_entropy(logits, some)
    assert next_token.matching_temperature(logits, some, own) == 1
    # Two tokens: H = h(½ + δ) at T, here p = (0.8, 0.2) at T = 1 and (0.5, 0.5) never.
    with pytest.raises(InputError, match="no temperature"):
        next_token.matching_temperature(logits, some, 2.5)


@pytest.mark.parametrize("kind", ["protot", "llama", "gpt2", "mamba"])
def test_logits_of_texts_of_all_lengths_are_those_of_each_alone(studied, kind):
    model, tokenizer = read_checkpoint(studied / kind)
    texts = [
        "The river",
        "A teacher describes the names of birds.",
        "Old maps",
        "The river carries",
    ]
    tokens = next_token.encode(model, tokenizer, texts)
    advanced = []
    kept = next_token.kept_logits(model, [*tokens, []], advanced.append)
    assert sum(advanced) == 4
    assert not kept[4].any()
    for row, ids in zip(kept, tokens, strict=False):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert np.allclose(row, expected, atol=1e-5)


def test_a_tokenizers_own_beginning_stands_before_and_its_end_does_not_follow(studied):
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = read_checkpoint(studied / "llama")
    (plain,) = next_token.encode(model, tokenizer, ["The river"])
    assert plain == tokenizer("The river", add_special_tokens=False)["input_ids"]
    name, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A {name}", special_tokens=[(name, number)]
    )
    assert tokenizer("The river")["input_ids"] == [number, *plain, number]
    assert next_token.encode(model, tokenizer, ["The river", ""]) == [[number, *plain], []]
