"""Held-out text for the figures of a run: the same windows each time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prismlm.corpus.layout import NONE_HELD_OUT
from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import WindowBatch, document_windows, window_batches
from prismlm.errors import InputError
from prismlm.models.evaluating import evaluating
from prismlm.progress import Task

TOKENS_PER_BATCH = 4096


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
        """Yield windows that own about ``tokens`` tokens together, or all that there are.

        Raises:
            InputError: no document is held out.
        """
        documents = self.corpus.split("heldout")
        if not len(documents):
            raise InputError(f"the corpus {self.corpus.name!r} {NONE_HELD_OUT}")
        order = np.random.default_rng(self.seed).permutation(documents)
        stride = max(1, self.window // 2)
        corpus = self.corpus
        laid = corpus.starts, corpus.lengths, self.window, stride, corpus.prefix
        grid = document_windows(order, *laid)
        owned = np.cumsum(grid.length - grid.skip)
        count = int(np.searchsorted(owned, tokens)) + 1
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

    Args:
        model: a causal language model.
        batches: of held-out text.
    """
    total, number = 0.0, 0
    with evaluating(model):
        for batch in batches:
            ids, attended, scored = batch.scored_on(model.device)
            logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
            chosen, targets = logits[:, :-1][scored].float(), ids[:, 1:][scored]
            total += F.cross_entropy(chosen, targets, reduction="sum").item()
            number += len(targets)
    return total / max(1, number)


def perplexity(ce: float) -> float:
    """Return exp(ce), of a cross-entropy in nats per token; infinity where that overflows."""
    try:
        return math.exp(ce)
    except OverflowError:
        return math.inf
