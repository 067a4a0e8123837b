"""What indexing a corpus would cost, from running a few of its batches."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.layers import PrototypeHead
from prismlm.lens.index import IndexOptions, check_index, scan_corpus

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

BATCHES_MEASURED = 3
# Of a kept context on disk: its compressed text and columns, and those columns alone.
BYTES_WITH_TEXT = 230
BYTES_WITHOUT_TEXT = 30
BYTES_PER_PROTOTYPE = 200
CHARACTERS_READ_PER_SECOND = 3_000_000
CHARACTERS_PER_TOKEN = 4
# The columns of a context while the best are being kept, beside its hidden state.
BYTES_PER_KEPT = 34


@dataclass(frozen=True)
class IndexEstimate:
    """The expected cost of an index: predictions read, seconds and bytes, all rough.

    Attributes:
        tokens: predictions to score.
        documents: documents to read.
        tokens_per_second: measured on a few batches.
        seconds: of the whole index, contexts' text included.
        memory_bytes: peak, the interpreter and model included.
        disk_bytes: of the finished lens.
    """

    tokens: int
    documents: int
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_index(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions | None = None
) -> IndexEstimate:
    """Estimate what ``build_index`` with the same arguments would cost; writes nothing.

    A few batches of documents spread over the split are scanned, after one that warms up.

    Raises:
        InputError: what ``build_index`` would refuse.
    """
    options = options or IndexOptions()
    documents = corpus.split(options.split)
    check_index(model, corpus, documents, options)
    tokens = int(corpus.lengths[documents].sum() - len(documents))
    sample = _sample(corpus, documents, options.tokens_per_batch)
    scan_corpus(model, head, corpus, sample[:1], options)
    began = time.perf_counter()
    scan_corpus(model, head, corpus, sample, options)
    per_place = (time.perf_counter() - began) / _places(corpus, sample, options)
    seconds = per_place * _places(corpus, documents, options)
    kept = head.num_prototypes * min(options.contexts, len(documents))
    per_context = BYTES_WITH_TEXT if options.with_text else BYTES_WITHOUT_TEXT
    read = tokens * CHARACTERS_PER_TOKEN / CHARACTERS_READ_PER_SECOND if options.with_text else 0.0
    # An update holds the old top, the new candidates and the sorted copy at once.
    top = 3 * head.num_prototypes * options.contexts * (2 * head.width + BYTES_PER_KEPT)
    return IndexEstimate(
        tokens=tokens,
        documents=len(documents),
        tokens_per_second=tokens / seconds,
        seconds=seconds + read,
        memory_bytes=_peak_bytes(model) + top,
        disk_bytes=kept * (2 * head.width + per_context)
        + head.num_prototypes * BYTES_PER_PROTOTYPE,
    )


def _places(corpus: Corpus, documents: np.ndarray, options: IndexOptions) -> int:
    """Return how many positions are computed, those that only fill batches among them."""
    from prismlm.corpus.windows import document_windows, padded_lengths

    grid = document_windows(
        documents, corpus.starts, corpus.lengths, options.window, options.stride
    )
    total = 0
    for width, windows in zip(*np.unique(padded_lengths(grid), return_counts=True), strict=True):
        rows = max(1, options.tokens_per_batch // int(width))
        total += -(-int(windows) // rows) * rows * int(width)
    return max(1, total)


def _sample(corpus: Corpus, documents: np.ndarray, tokens_per_batch: int) -> np.ndarray:
    wanted = BATCHES_MEASURED * tokens_per_batch
    step = max(1, int(corpus.lengths[documents].sum() // wanted))
    spread = documents[::step]
    enough = int(np.searchsorted(np.cumsum(corpus.lengths[spread]), wanted)) + 1
    return spread[:enough]


def _peak_bytes(model: PreTrainedModel) -> int:
    if model.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(model.device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
