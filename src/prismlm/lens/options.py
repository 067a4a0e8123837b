"""How a corpus is read for a lens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from prismlm.errors import InputError, check_whole
from prismlm.lens.codes import CodeName, check_codes
from prismlm.lens.training_corpus import trained_length

if TYPE_CHECKING:
    from prismlm.corpus.store import Split

MAX_DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Shard:
    """One part of an index that several processes make: which, from 0, and of how many."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class IndexOptions:
    """How a corpus is read.

    Attributes:
        contexts: L, the places kept per prototype; one per document.
        window: tokens of a window, at most what the model can read; 0: as in training if that is
            known, otherwise what the model can read, up to 1,024.
        stride: tokens between windows; 0: three quarters of a window. A token sees at least
            window − stride tokens before it, or its document's start.
        split: which documents to read.
        with_text: keep the text around each context and what finds spans word for word, or offsets
            only.
        positions: the share of all positions that goes to the cells.
        codes: of their hidden states: int8, or pq for a quarter of the size.
        bf16: run the forward passes in bfloat16 (autocast).
        shard: the part of the corpus to read.
    """

    contexts: int = 64
    window: int = 0
    stride: int = 0
    split: Split = "train"
    with_text: bool = True
    positions: float = 1.0
    codes: CodeName = "int8"
    bf16: bool = False
    shard: Shard = Shard()


def options_for(
    model: PreTrainedModel, options: IndexOptions, path: Path | None = None
) -> IndexOptions:
    """Return options with window and stride filled in for a model, of a directory if one is given.

    Raises:
        InputError: one that no corpus is needed for cannot be used.
    """
    for name, least in (("contexts", 1), ("window", 0), ("stride", 0)):
        check_whole(f"--{name}", getattr(options, name), least)
    check_whole("the part to read", options.shard.number, 0, options.shard.count - 1)
    reads = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(reads or MAX_DEFAULT_WINDOW, MAX_DEFAULT_WINDOW)
    window = options.window or (path and trained_length(path)) or longest
    check_share(options.positions)
    check_codes(options.codes)
    if reads is not None and window > reads:
        raise InputError(
            f"a window of {window} tokens does not fit a model that reads {reads}: "
            f"pass --window {reads} or less."
        )
    stride = options.stride or max(1, window * 3 // 4)
    return replace(options, window=window, stride=check_whole("--stride", stride, 1, window))


def check_share(share: float) -> float:
    """Return a share of positions; InputError unless it is above 0 and up to 1."""
    if not 0 < share <= 1:  # NaN is refused too
        raise InputError(
            f"--positions is {share:g}: expected a share of the corpus's positions above 0 and up "
            "to 1."
        )
    return share
