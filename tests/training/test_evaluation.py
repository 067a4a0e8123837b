"""Cross-entropies on held-out text, and verdicts on them."""

import json
import math

import numpy as np
import pytest

from prismlm.corpus import Corpus, build_corpus
from prismlm.training.evaluation import HeldOut, unigram_ce, verdict
from tests.helpers.begun import begun_tokenizer


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


def test_every_window_begins_with_the_token_that_a_tokenizer_puts_first(tmp_path):
    """It is context, which nothing is asked to predict."""
    tokenizer, texts = begun_tokenizer(), tmp_path / "texts.jsonl"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": f"{number} patients were given the drug. " * 20} for number in range(30)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = build_corpus(texts, tmp_path / "corpus", tokenizer=tmp_path / "tokenizer")
    bos = tokenizer.bos_token_id
    for batch in HeldOut(corpus, 32, seed=0).batches(300):
        ids, attended, scored = batch.scored_on("cpu")
        # A batch may be filled up with rows of padding.
        used = scored.any(1)
        assert used.any()
        assert (ids[used, 0] == bos).all()
        assert attended[used, 0].all()
        assert not (ids[:, 1:] == bos)[scored].any()
