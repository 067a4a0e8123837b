"""A corpus cut into blocks that can be read one by one: the unit of work of an index.

What a block holds and how it is computed follow from the corpus, the window and the stride alone,
never from how many processes work on it, where they were interrupted or how much they take at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prismlm.corpus import layout
from prismlm.corpus.windows import (
    WindowBatch,
    WindowGrid,
    batch_of,
    document_windows,
    padded_lengths,
)

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

GROUP_COLUMNS = ("source", "domain", "license")
# A corpus has some 500 blocks or more, so that a hundredth of it is a few.
BLOCKS_WANTED = 512
SMALLEST_BLOCK = 2**12
LARGEST_BLOCK = 2**18
# Positions of a forward pass, padding among them.
PASS_TOKENS = 4096
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How many blocks a corpus has, and in which order they are read.

    Block b holds the documents that start at a position from b·size up to, without, (b+1)·size.
    The s-th block read is s·step mod count, with a step near count/φ, so that the first blocks
    lie evenly over the corpus, however it is ordered.

    Attributes:
        size: tokens, a power of two.
        count: blocks, those without documents among them.
        step: blocks from one to the next; shares no factor with count.
    """

    size: int
    count: int
    step: int

    @classmethod
    def of(cls, num_tokens: int) -> BlockOrder:
        """Return the order of a corpus of ``num_tokens``."""
        wanted = max(1, num_tokens // BLOCKS_WANTED)
        size = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (wanted.bit_length() - 1)))
        count = max(1, -(-num_tokens // size))
        step = max(1, round(count * _GOLDEN))
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
    """Read which documents of a split a block holds, and lay windows over them.

    Raises:
        InputError: the window or stride is out of range.
        FormatError: the corpus is damaged.
    """
    rows = corpus.documents.between(number * order.size, (number + 1) * order.size)
    kept = _in_split(corpus, rows.table["doc_id"].to_pylist(), split)
    table, numbers = rows.table.filter(kept), rows.numbers[kept]
    grid = document_windows(
        np.arange(len(numbers)),
        table["start"].to_numpy(),
        table["length"].to_numpy(),
        window,
        stride,
    )
    columns = [table[name].to_pylist() for name in GROUP_COLUMNS]
    found: dict[tuple[str | None, ...], int] = {}
    keys = [found.setdefault(key, len(found)) for key in zip(*columns, strict=True)]
    key = np.array(keys, dtype=np.int64)[grid.document]
    numbered = WindowGrid(numbers[grid.document], grid.start, grid.length, grid.skip, window)
    return Block(numbered, list(found), key)


def _in_split(corpus: Corpus, doc_ids: list[str], split: Split) -> np.ndarray:
    if split == "all":
        return np.ones(len(doc_ids), dtype=bool)
    fraction = corpus.meta["split"]["heldout_fraction"]
    held = (layout.is_held_out(doc_id, fraction) for doc_id in doc_ids)
    return np.fromiter(held, dtype=bool, count=len(doc_ids)) == (split == "heldout")


def block_passes(
    block: Block, corpus: Corpus, pad_id: int
) -> Iterator[tuple[WindowBatch, np.ndarray]]:
    """Yield the forward passes of a block with each window's key, the longest windows first.

    Windows of one padded length go together, at most 4,096 positions a pass; what is left of a
    length is a smaller pass. Shapes and neighbours thus follow from the block alone.
    """
    padded = padded_lengths(block.grid)
    for width in np.unique(padded)[::-1].tolist():
        members = np.flatnonzero(padded == width)
        rows = max(1, PASS_TOKENS // width)
        for first in range(0, len(members), rows):
            chosen = members[first : first + rows]
            shape = (len(chosen), width)
            yield batch_of(block.grid, corpus, chosen, shape, pad_id), block.key[chosen]


def split_counts(corpus: Corpus, split: Split) -> tuple[int, int]:
    """Return the documents and tokens of a split, as ``corpus.json`` counts them."""
    counts, heldout = corpus.meta["counts"], corpus.meta["heldout"]
    if split == "all":
        return counts["documents"], counts["tokens"]
    if split == "heldout":
        return heldout["documents"], heldout["tokens"]
    return counts["documents"] - heldout["documents"], counts["tokens"] - heldout["tokens"]
