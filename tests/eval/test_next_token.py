"""Next-token distributions, by hand and of tiny models."""

import math

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from prismlm.errors import InputError
from prismlm.eval import next_token
from prismlm.models.checkpoint import read_checkpoint


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
    js = next_token.jensen_shannon(log(*p), log(*q))
    assert float(js) == pytest.approx(expected, abs=1e-6)


def test_ranks_by_hand():
    p, q = log(0.4, 0.3, 0.2, 0.1), log(0.1, 0.3, 0.35, 0.25)
    assert float(next_token.top_overlap(p, q, 2)) == 0.5
    assert float(next_token.top_overlap(p, q, 10)) == 1
    assert float(next_token.same_top(p, q)) == 0
    assert float(next_token.same_top(p, p)) == 1
    # Ranks 4 3 2 1 and 1 3 4 2: 1 − 6 (9 + 0 + 4 + 1) / (4 · 15)
    assert float(next_token.rank_correlation(p, q)) == pytest.approx(-0.4)
    # Of the top two of either, tokens 0, 1 and 2: ranks 3 2 1 and 1 2 3.
    assert float(next_token.rank_correlation(p, q, 2)) == pytest.approx(-1)


def test_a_temperature_gives_the_target_entropy():
    logits = np.random.default_rng(0).normal(size=(100, 9)).astype(np.float32)
    rows = np.arange(0, 100, 2)
    for target in (0.3, 1.2, 2.0):
        temperature = next_token.matching_temperature(logits, rows, target)
        assert next_token.mean_entropy(logits, rows, temperature) == pytest.approx(target, abs=1e-5)
    current = next_token.mean_entropy(logits, rows)
    assert next_token.matching_temperature(logits, rows, current) == 1
    # More than ln 9.
    with pytest.raises(InputError, match="no temperature"):
        next_token.matching_temperature(logits, rows, 2.5)


@pytest.mark.parametrize("kind", ["protot", "llama", "gpt2", "mamba"])
def test_logits_of_a_batch_equal_those_of_single_texts(studied, kind):
    model, tokenizer = read_checkpoint(studied / kind)
    sentence = "A teacher describes the names of birds."
    rows = next_token.encode(model, tokenizer, ["The river", sentence, "Old maps", "The river c"])
    counts = []
    logits = next_token.logits_on_disk(model, [*rows, []], counts.append)
    assert sum(counts) == 4
    assert not logits[4].any()
    for row, ids in zip(logits, rows, strict=False):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert np.allclose(row, expected, atol=1e-5)


def test_texts_get_the_tokenizers_prefix_but_not_its_suffix(studied):
    model, tokenizer = read_checkpoint(studied / "llama")
    (plain,) = next_token.encode(model, tokenizer, ["The river"])
    assert plain == tokenizer("The river", add_special_tokens=False)["input_ids"]
    name, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A {name}", special_tokens=[(name, number)]
    )
    assert tokenizer("The river")["input_ids"] == [number, *plain, number]
    assert next_token.encode(model, tokenizer, ["The river", ""]) == [[number, *plain], []]
