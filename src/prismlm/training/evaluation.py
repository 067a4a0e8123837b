"""What a run is worth: figures on the same held-out text each time, and a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prismlm.corpus.layout import NONE_HELD_OUT
from prismlm.corpus.store import Corpus, Split
from prismlm.corpus.windows import WindowBatch, document_windows, window_batches
from prismlm.errors import InputError
from prismlm.models.watch import evaluating
from prismlm.progress import Task

TOKENS_PER_BATCH = 4096
# Up to four passes over a text are worth nearly as much as new text, further ones less and less
# (Muennighoff et al. 2023, Scaling Data-Constrained Language Models).
MAX_PASSES = 4
# Nats by which an evaluation must be worse than the best: 5 % of perplexity.
WORSE = 0.05
# Tokens of each split that frequencies are counted on.
COUNTED = 5_000_000


@dataclass(frozen=True)
class HeldOut:
    """Windows over held-out documents in an order drawn from a seed.

    Attributes:
        corpus: where the text is.
        window: tokens of a window; half of it is context for all but a document's start.
        seed: decides which documents come first.
    """

    corpus: Corpus
    window: int
    seed: int

    def batches(self, tokens: int) -> Iterator[WindowBatch]:
        """Yield windows that own about ``tokens`` tokens together, or all that there are."""
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
        names = ("document", "start", "length", "skip")
        chosen = replace(grid, **{name: getattr(grid, name)[:count] for name in names})
        return window_batches(chosen, corpus, TOKENS_PER_BATCH, corpus.eos_token_id)

    def counted(self, tokens: int, task: Task) -> Iterator[WindowBatch]:
        """Yield :meth:`batches`; a task is told how many tokens were read."""
        for batch in self.batches(tokens):
            yield batch
            task.advance(int(batch.owned.sum()))


@torch.no_grad()
def cross_entropy(model: Any, batches: Iterable[WindowBatch]) -> float:
    """Return the cross-entropy of a model in nats per token, over the predictions that count.

    They are those of :func:`prismlm.explain.quality.measure_quality`.
    """
    total, number = 0.0, 0
    with evaluating(model):
        for batch in batches:
            ids, attended, scored = batch.scored_on(model.device)
            logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
            total += summed_cross_entropy(logits, ids, scored)
            number += int(scored.sum())
    return total / max(1, number)


def summed_cross_entropy(logits: Tensor, ids: Tensor, scored: Tensor) -> float:
    """Return the cross-entropy summed over a batch's predictions that are ``scored``, in nats."""
    chosen, targets = logits[:, :-1][scored].float(), ids[:, 1:][scored]
    return F.cross_entropy(chosen, targets, reduction="sum").item()


def perplexity(ce: float) -> float:
    """Return exp(ce), of a cross-entropy in nats per token; infinity where that overflows."""
    try:
        return math.exp(ce)
    except OverflowError:
        return math.inf


def unigram_ce(corpus: Corpus) -> float:
    """Return the cross-entropy, in nats per token, of guessing tokens by their frequency alone.

        −Σ_v h_v ln((c_v + 1) / Σ_u (c_u + 1)) / Σ_v h_v

    with c_v and h_v how often token v occurs in training and in held-out documents.
    """
    training, heldout = token_counts(corpus, "train"), token_counts(corpus, "heldout")
    guess = np.log(training + 1) - math.log((training + 1).sum())
    return float(-(heldout @ guess) / max(1, heldout.sum()))


def token_counts(corpus: Corpus, split: Split) -> np.ndarray:
    """Return how often each token occurs in a split, in documents drawn at random if it is long."""
    counts = np.zeros(len(corpus.tokenizer), dtype=np.int64)
    for number in np.random.default_rng(0).permutation(corpus.split(split)).tolist():
        tokens = corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number]))
        counts += np.bincount(tokens, minlength=len(counts))
        if counts.sum() >= COUNTED:
            break
    return counts


def verdict(ce: float, unigram: float, history: Sequence[dict[str, Any]]) -> str:
    """Return what a cross-entropy on held-out text says of a run, in a sentence or two."""
    if ce >= unigram:
        return (
            "The model predicts held-out text no better than token frequencies do. Train it "
            "longer, or try another learning rate."
        )
    figures = [(row["eval_ce"], row["step"]) for row in history if "eval_ce" in row]
    if figures and figures[-1][0] - min(figures)[0] > WORSE:
        return (
            f"The model overfits: it was better on held-out text at step {min(figures)[1]:,}. Use "
            "more text, or stop there."
        )
    ratio = math.exp(unigram - ce)
    return f"The perplexity of token frequencies alone is {ratio:,.1f} times as high."
