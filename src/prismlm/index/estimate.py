"""What indexing a corpus would cost, from running a few of its passes."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from prismlm.corpus.blocks import PASS_TOKENS, BlockOrder, split_counts
from prismlm.index.build import IndexOptions, check_index, scan_input
from prismlm.index.codes import parts_of
from prismlm.index.scan import Scan, scan_passes
from prismlm.index.spool import Spool
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

PASSES_MEASURED = 6
# Of a kept context on disk: its compressed text and columns, and those columns alone.
BYTES_WITH_TEXT = 230
BYTES_WITHOUT_TEXT = 30
BYTES_PER_PROTOTYPE = 200
# Of a position, beside its coded state: offset, probability, scale, and its part of the ranges.
BYTES_PER_POSITION = 14
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
        tokens_per_second: measured on a few forward passes.
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

    A few forward passes of the first blocks are scanned, after one that warms up.

    Raises:
        InputError: what ``build_index`` would refuse.
    """
    options = options or IndexOptions()
    check_index(model, corpus, options)
    documents, tokens = split_counts(corpus, options.split)
    tokens -= documents
    per_token = _seconds_per_token(model, head, corpus, options)
    seconds = per_token * tokens
    kept = head.num_prototypes * min(options.contexts, documents)
    # Only the documents of kept contexts are read again.
    read = min(tokens, kept * tokens / max(1, documents)) if options.with_text else 0.0
    # An update holds the old top, the new candidates and the sorted copy at once.
    top = 3 * head.num_prototypes * options.contexts * (2 * head.width + BYTES_PER_KEPT)
    return IndexEstimate(
        tokens=tokens,
        documents=documents,
        tokens_per_second=1 / per_token,
        seconds=seconds + read * CHARACTERS_PER_TOKEN / CHARACTERS_READ_PER_SECOND,
        memory_bytes=_peak_bytes(model) + top,
        disk_bytes=lens_bytes(head, options, documents, tokens),
    )


def lens_bytes(
    head: PrototypeHead, options: IndexOptions, documents: int | None, tokens: int | None
) -> int:
    """Return about how many bytes a lens of so many documents and tokens has; None: at most.

    While positions are being sorted they are on the disk in int8 as well.
    """
    contexts = options.contexts if documents is None else min(options.contexts, documents)
    per_context = BYTES_WITH_TEXT if options.with_text else BYTES_WITHOUT_TEXT
    kept = head.num_prototypes * contexts
    state = head.width if options.codes == "int8" else parts_of(head.width, options.codes)
    positions = (tokens or 0) * (options.positions or 0) * (state + BYTES_PER_POSITION)
    whole = kept * (2 * head.width + per_context) + head.num_prototypes * BYTES_PER_PROTOTYPE
    return whole + int(positions)


def _seconds_per_token(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions
) -> float:
    """Scan the first blocks of the order until enough passes are measured, after one to warm up."""
    order = BlockOrder.of(corpus.num_tokens)
    given = scan_input(model, head, corpus, options)
    scan = Scan.empty(head.num_prototypes, options.contexts, head.width, order.count, 0)
    began, first, wanted = time.perf_counter(), 0, PASSES_MEASURED * PASS_TOKENS // 2
    # Nothing is written: so few positions wait in memory.
    scan.spool = None if options.positions is None else Spool(Path(), head.width)
    with evaluating(model):
        for number, done in enumerate(scan_passes(scan, given, order.count)):
            if number == 0:
                began, first = time.perf_counter(), done
            elif scan.tokens - first >= wanted:
                break
    measured = scan.tokens - first
    return (time.perf_counter() - began) / measured if measured else 1e-4


def _peak_bytes(model: PreTrainedModel) -> int:
    if model.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(model.device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
