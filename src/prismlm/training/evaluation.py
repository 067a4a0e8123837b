"""Held-out text for the figures of a run: the same windows each time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import WindowBatch, WindowGrid, document_windows, window_batches
from prismlm.errors import InputError

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
            raise InputError(
                f"the corpus {self.corpus.name!r} holds no document out, so there is nothing to "
                "measure on: build it from more documents or with a larger --heldout share."
            )
        order = np.random.default_rng(self.seed).permutation(documents)
        stride = max(1, self.window // 2)
        corpus = self.corpus
        grid = document_windows(order, corpus.starts, corpus.lengths, self.window, stride)
        owned = np.cumsum(grid.length - grid.skip)
        count = int(np.searchsorted(owned, tokens)) + 1
        chosen = WindowGrid(
            grid.document[:count],
            grid.start[:count],
            grid.length[:count],
            grid.skip[:count],
            grid.window,
        )
        return window_batches(chosen, corpus, TOKENS_PER_BATCH, corpus.eos_token_id)


def perplexity(ce: float) -> float:
    """Return exp(ce), of a cross-entropy in nats per token; infinity where that overflows."""
    try:
        return math.exp(ce)
    except OverflowError:
        return math.inf
