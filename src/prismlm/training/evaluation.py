"""Held-out text, cross-entropies on it, and a verdict on a run in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prismlm.corpus.layout import NONE_HELD_OUT
from prismlm.corpus.store import Corpus, Split
from prismlm.corpus.windows import WindowBatch, document_windows, window_batches
from prismlm.errors import InputError
from prismlm.progress import Task

TOKENS_PER_BATCH = 4096
# Up to four passes over a text are worth nearly as much as new text, further ones less and less
# (Muennighoff et al. 2023, Scaling Data-Constrained Language Models).
MAX_PASSES = 4
# A run overfits if its last evaluation is this many nats (5 % of perplexity) above the best.
OVERFITTING = 0.05
# Token frequencies are counted on a sample of this many tokens.
COUNTED_TOKENS = 5_000_000


@dataclass(frozen=True)
class HeldOut:
    """Windows over held-out documents in random order.

    Half of a window is context, except at the start of a document.
    """

    corpus: Corpus
    window: int
    seed: int

    def batches(self, tokens: int) -> Iterator[WindowBatch]:
        """Yield windows with about ``tokens`` scored tokens in total, or all that there are."""
        corpus = self.corpus
        documents = corpus.split("heldout")
        if not len(documents):
            raise InputError(f"the corpus {corpus.name!r} {NONE_HELD_OUT}")
        order = np.random.default_rng(self.seed).permutation(documents)
        stride = max(1, self.window // 2)
        grid = document_windows(
            order, corpus.starts, corpus.lengths, self.window, stride, corpus.prefix
        )
        count = int(np.searchsorted(np.cumsum(grid.length - grid.skip), tokens)) + 1
        first = grid.take(slice(count))
        return window_batches(first, corpus, TOKENS_PER_BATCH)

    def counted(self, tokens: int, task: Task) -> Iterator[WindowBatch]:
        """Yield :meth:`batches` and advance a progress task by their tokens."""
        for batch in self.batches(tokens):
            yield batch
            task.advance(int(batch.owned.sum()))


def perplexity(ce: float) -> float:
    """Return exp(ce), or infinity if it overflows."""
    return float(np.exp(ce))


def unigram_ce(corpus: Corpus) -> float:
    """Return the cross-entropy, in nats per token, of predicting tokens by frequency alone.

        −Σ_v h_v ln((c_v + 1) / Σ_u (c_u + 1)) / Σ_v h_v

    where token v occurs c_v times in training documents and h_v times in held-out documents.
    """
    training, heldout = token_counts(corpus, "train"), token_counts(corpus, "heldout")
    log_probabilities = np.log(training + 1) - math.log((training + 1).sum())
    return float(-(heldout @ log_probabilities) / max(1, heldout.sum()))


def token_counts(corpus: Corpus, split: Split) -> np.ndarray:
    """Return how often each token occurs in a split, or in a random sample of a long one."""
    counts = np.zeros(len(corpus.tokenizer), dtype=np.int64)
    for number in np.random.default_rng(0).permutation(corpus.split(split)).tolist():
        tokens = corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number]))
        counts += np.bincount(tokens, minlength=len(counts))
        if counts.sum() >= COUNTED_TOKENS:
            break
    return counts


def verdict(ce: float, unigram: float, history: Sequence[dict[str, Any]]) -> str:
    """Return what a cross-entropy on held-out text says about a run, in a sentence or two."""
    if ce >= unigram:
        return (
            "The model predicts held-out text no better than token frequencies do. Train it "
            "longer, or try another learning rate."
        )
    evaluations = [(row["eval_ce"], row["step"]) for row in history if "eval_ce" in row]
    if evaluations and evaluations[-1][0] - min(evaluations)[0] > OVERFITTING:
        return (
            f"The model overfits: it was better on held-out text at step {min(evaluations)[1]:,}. "
            "Use more text, or stop there."
        )
    ratio = math.exp(unigram - ce)
    return f"The perplexity of token frequencies alone is {ratio:,.1f} times as high."
