"""Cross-entropies on held-out text, and verdicts on them."""

import math

import numpy as np
import pytest

from prismlm.corpus import Corpus
from prismlm.training.evaluation import unigram_ce, verdict


def test_the_cross_entropy_of_guessing_by_frequency(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    counts = {}
    for split in ("train", "heldout"):
        counts[split] = np.zeros(len(corpus.tokenizer))
        for number in corpus.split(split):
            for token in corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number])):
                counts[split][token] += 1
    guess = (counts["train"] + 1) / (counts["train"] + 1).sum()
    expected = -(counts["heldout"] * np.log(guess)).sum() / counts["heldout"].sum()
    assert unigram_ce(corpus) == pytest.approx(expected)
    assert 0 < expected < math.log(len(corpus.tokenizer))


@pytest.mark.parametrize(
    ("ce", "evaluations", "expected"),
    [
        (7.0, (), "no better than token frequencies"),
        (6.0, (5.5, 5.54), "is 2.7 times as high"),
        (6.0, (5.5, 5.9), "was better on held-out text at step 10."),
    ],
)
def test_verdicts(ce, evaluations, expected):
    history = [{"step": 10 * n, "eval_ce": ce_} for n, ce_ in enumerate(evaluations, 1)]
    assert expected in verdict(ce, 7.0, [{"step": 1, "loss": 9.0}, *history])
