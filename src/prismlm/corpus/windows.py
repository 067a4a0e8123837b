"""Windows: which stretch of a document gives each token its hidden state; and blocks of them.

A block is the unit of work of an index. What it holds and how it is computed follow from corpus,
window and stride alone, however many processes work on it and wherever they were interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from prismlm.corpus import layout
from prismlm.errors import InputError

if TYPE_CHECKING:
    import torch

    from prismlm.corpus.store import Corpus, Split

PADDING_MULTIPLE = 64
GROUP_COLUMNS = ("source", "domain", "license")
# A corpus has some 500 blocks or more, so that a hundredth of it is a few.
BLOCKS_WANTED, MIN_BLOCK, MAX_BLOCK = 512, 2**12, 2**18
# Positions of a forward pass, padding among them.
PASS_TOKENS = 4096
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, eq=False)
class WindowGrid:
    """Windows over documents; every token of them is owned by exactly one.

    Attributes:
        document, start, length: each window's document, the global position of its first token and
            its tokens, at most ``window``; int64 [windows] each.
        skip: how many of its first tokens an earlier window owns, int64 [windows].
        window: the most tokens of a window.
        prefix: replaces the first tokens of windows that start inside a document, which earlier
            ones own; those at its start have it as the document has.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    skip: np.ndarray
    window: int
    prefix: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.document)


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """Windows of one padded length; B rows by T positions, T a multiple of 64 or the window.

    Attributes:
        input_ids: int64 [B, T], the padding token beyond a window's end.
        attention_mask: bool [B, T], true on the tokens of the window (and on the first position of
            rows that only fill the batch, since no kernel likes a row that sees nothing).
        owned: bool [B, T], true on the tokens whose state this window gives.
        positions: int64 [B, T], global token positions, −1 on padding. Where the prefix stands
            inside a document, that of the token it stands in place of.
        document: int64 [B], document numbers, −1 on rows that only fill the batch.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    owned: torch.Tensor
    positions: torch.Tensor
    document: torch.Tensor

    def scored_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids and attention mask as a model takes them, and which predictions count.

        One counts, bool [B, T − 1], if its position is owned and its target lies in the window.
        """
        given = (self.input_ids, self.attention_mask, self.owned)
        ids, attended, owned = (tensor.to(device) for tensor in given)
        return ids, attended.long(), owned[:, :-1] & attended[:, 1:]


def document_windows(
    document_indices: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    window: int,
    stride: int,
    prefix: Sequence[int] = (),
) -> WindowGrid:
    """Lay windows over the documents: one at each document's start and every ``stride`` tokens.

    The first window of a document owns all of its tokens, each later one those beyond the end of
    the window before, so that a token's state has at least ``window − stride`` tokens of context
    or all that the document has. A window that would own nothing is left out. Windows overlap by
    ``prefix`` at least, whatever the stride, since that stands at the start of each.

    Args:
        document_indices: the documents, int64 [n]; windows come in this order.
        starts, lengths: of every document of the corpus, int64.
        window, stride: the most tokens of a window, and those between two windows' starts.
        prefix: what the tokenizer puts before a text.
    """
    if window <= len(prefix):
        raise InputError(f"A window of {window} tokens: expected at least {len(prefix) + 1}.")
    if not 1 <= stride <= window:
        raise InputError(
            f"A stride of {stride} tokens with windows of {window}: expected 1 to {window}, "
            "or tokens would be left out."
        )
    stride = min(stride, window - len(prefix))
    indices = np.asarray(document_indices, dtype=np.int64)
    length = lengths[indices]
    later = np.maximum(0, -(-(length - window) // stride))
    counts = np.where(length > 0, 1 + later, 0)
    row = np.repeat(np.arange(len(indices)), counts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = number * stride
    return WindowGrid(
        document=indices[row],
        start=starts[indices][row] + offset,
        length=np.minimum(window, length[row] - offset),
        skip=np.where(number > 0, window - stride, 0),
        window=window,
        prefix=prefix,
    )


def _of_one_width(grid: WindowGrid, tokens: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield windows that are padded alike, the longest first; as many rows as ``tokens`` hold."""
    rounded = -(-grid.length // PADDING_MULTIPLE) * PADDING_MULTIPLE
    padded = np.minimum(rounded, grid.window)
    for width in np.unique(padded)[::-1].tolist():
        members, rows = np.flatnonzero(padded == width), max(1, tokens // width)
        for first in range(0, len(members), rows):
            yield members[first : first + rows], rows, width


def window_batches(
    grid: WindowGrid, corpus: Corpus, tokens_per_batch: int, pad_id: int
) -> Iterator[WindowBatch]:
    """Yield the windows in batches of a fixed shape, the longest first, else in the grid's order.

    A batch of windows padded to T has always max(1, tokens_per_batch // T) rows, the last filled
    up with rows of padding. The shape that a window is computed in thus depends on its own length
    alone, and so do the last bits of its hidden states.
    """
    if tokens_per_batch < 1:
        raise InputError(f"Batches of {tokens_per_batch} tokens: expected at least 1.")
    for members, rows, width in _of_one_width(grid, tokens_per_batch):
        yield batch_of(grid, corpus, members, (rows, width), pad_id)


class TokenSource(Protocol):
    """What gives the tokens of a corpus by position: itself, or a lens that holds them."""

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Return ``length`` tokens of one document from a global position on."""
        ...


def batch_of(
    grid: WindowGrid, corpus: TokenSource, members: np.ndarray, shape: tuple[int, int], pad_id: int
) -> WindowBatch:
    """Return the windows ``members`` of a grid as one batch of ``shape`` rows by positions."""
    import torch

    input_ids, positions = np.full(shape, pad_id, np.int64), np.full(shape, -1, np.int64)
    attention_mask, owned = np.zeros(shape, bool), np.zeros(shape, bool)
    document = np.full(shape[0], -1, np.int64)
    for row, member in enumerate(members):
        start, length = int(grid.start[member]), int(grid.length[member])
        input_ids[row, :length] = corpus.read_tokens(start, length)
        if grid.skip[member] and len(grid.prefix):
            input_ids[row, : len(grid.prefix)] = grid.prefix
        attention_mask[row, :length] = True
        owned[row, grid.skip[member] : length] = True
        positions[row, :length] = np.arange(start, start + length)
        document[row] = grid.document[member]
    attention_mask[len(members) :, 0] = True
    return WindowBatch(
        *map(torch.from_numpy, (input_ids, attention_mask, owned, positions, document))
    )


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How many blocks a corpus has, and in which order they are read.

    Block b holds the documents that start at a position from b·size up to, without, (b+1)·size.
    The s-th block read is s·step mod count, with a step near count/φ that shares no factor with
    count, so that the first blocks lie evenly over the corpus, however it is ordered.
    """

    size: int
    count: int
    step: int

    @classmethod
    def of(cls, num_tokens: int) -> BlockOrder:
        """Return the order of a corpus of ``num_tokens``; the size of a block is a power of two."""
        wanted = max(1, num_tokens // BLOCKS_WANTED)
        size = min(MAX_BLOCK, max(MIN_BLOCK, 1 << (wanted.bit_length() - 1)))
        count = max(1, -(-num_tokens // size))
        step = max(1, round(count * GOLDEN))
        while math.gcd(step, count) != 1:
            step += 1
        return cls(size, count, step)

    def block(self, slot: int) -> int:
        """Return which block is read as the ``slot``-th, from 0."""
        return slot * self.step % self.count

    def slots(self, shard: int, shards: int) -> range:
        """Return the slots that are the ``shard``-th of ``shards`` parts, from 0."""
        return range(self.count * shard // shards, self.count * (shard + 1) // shards)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The windows of one block.

    Attributes:
        grid: the windows of its documents.
        keys: the distinct (source, domain, licence) of its documents.
        key: which of them each window's document has, int64 [windows].
    """

    grid: WindowGrid
    keys: list[tuple[str | None, ...]]
    key: np.ndarray


def read_block(
    corpus: Corpus, order: BlockOrder, number: int, split: Split, window: int, stride: int
) -> Block:
    """Read which documents of a split a block holds, and lay windows over them."""
    first, last = np.searchsorted(corpus.starts, [number * order.size, (number + 1) * order.size])
    numbers = np.arange(first, last)
    table = corpus.documents.take(numbers)
    if split != "all":
        kept = layout.held_out(table, corpus.meta["split"]) == (split == "heldout")
        table, numbers = table.filter(kept), numbers[kept]
    laid = corpus.starts, corpus.lengths, window, stride, corpus.prefix
    grid = document_windows(numbers, *laid)
    found: dict[tuple[str | None, ...], int] = {}
    rows = zip(*(table[name].to_pylist() for name in GROUP_COLUMNS), strict=True)
    keys = np.array([found.setdefault(row, len(found)) for row in rows], dtype=np.int64)
    return Block(grid, list(found), keys[np.searchsorted(numbers, grid.document)])


def block_passes(
    block: Block, corpus: Corpus, pad_id: int, tokens: int = PASS_TOKENS
) -> Iterator[tuple[WindowBatch, np.ndarray]]:
    """Yield the forward passes of a block with each window's key, the longest windows first.

    Windows of one padded length go together, at most ``tokens`` positions a pass; what is left of a
    length is a smaller pass. Shapes and neighbours thus follow from the block alone, and positions
    come in the same order however many a pass has.
    """
    for members, _, width in _of_one_width(block.grid, tokens):
        shape = (len(members), width)
        yield batch_of(block.grid, corpus, members, shape, pad_id), block.key[members]


def split_counts(corpus: Corpus, split: Split) -> tuple[int, int]:
    """Return the documents and tokens of a split, as ``corpus.json`` counts them."""
    counts, heldout = corpus.meta["counts"], corpus.meta["heldout"]
    if split == "all":
        return counts["documents"], counts["tokens"]
    if split == "heldout":
        return heldout["documents"], heldout["tokens"]
    return counts["documents"] - heldout["documents"], counts["tokens"] - heldout["tokens"]
