"""Documents cut to windows for hidden states, in batches, and to packed rows for training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.errors import InputError, check_whole

if TYPE_CHECKING:
    import torch

    from prismlm.corpus.store import Corpus, Split

PADDING_MULTIPLE = 64
# At least some 500 blocks, so that a hundredth of a corpus is several of them.
TARGET_BLOCKS, MIN_BLOCK, MAX_BLOCK = 512, 2**12, 2**18
# Positions per forward pass, padding included.
PASS_TOKENS = 4096
GOLDEN = (math.sqrt(5) - 1) / 2
# Label of a position that is not trained on.
IGNORED = -100


@dataclass(frozen=True, slots=True, eq=False)
class WindowGrid:
    """Windows over documents; every token of them is owned by exactly one.

    Attributes:
        document, start, length: each window's document, the global position of its first token and
            its number of tokens, at most ``window``; int64 [windows] each.
        skip: how many of its first tokens an earlier window owns, int64 [windows].
        prefix: replaces the first tokens of windows that start inside a document.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    skip: np.ndarray
    window: int
    prefix: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.document)

    def take(self, rows: np.ndarray | slice) -> WindowGrid:
        """Return some of the windows, by mask, indices or slice."""
        start, length, skip = self.start[rows], self.length[rows], self.skip[rows]
        return WindowGrid(self.document[rows], start, length, skip, self.window, self.prefix)


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """Windows of similar length; B rows by T positions, T a multiple of 64 or the window.

    Attributes:
        input_ids: int64 [B, T], end-of-text tokens beyond a window's end.
        attention_mask: bool [B, T], true on the tokens of the window.
        owned: bool [B, T], true on the tokens whose state this window gives.
        positions: int64 [B, T], global token positions, −1 on padding. A prefix inside a document
            has the positions of the tokens that it replaces.
        document: int64 [B], document numbers.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    owned: torch.Tensor
    positions: torch.Tensor
    document: torch.Tensor

    def scored_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return input ids and attention mask for a model, and which predictions count.

        A prediction counts, bool [B, T − 1], if its position is owned and has a target.
        """
        ids, mask = self.input_ids.to(device), self.attention_mask.to(device)
        return ids, mask.long(), self.owned.to(device)[:, :-1] & mask[:, 1:]


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
    or all that the document has. Windows without tokens of their own are omitted. Windows overlap
    by at least ``prefix``, which replaces the first tokens of each.

    Args:
        document_indices: document numbers, int64 [n]; windows come in this order.
        starts, lengths: of every document of the corpus, int64.
        window: the maximum length of a window.
        stride: tokens between the starts of two windows.
        prefix: the tokens that the tokenizer puts before a text.
    """
    check_whole("the window", window, len(prefix) + 1)
    check_whole("the stride of the windows", stride, 1, window)
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


def window_batches(grid: WindowGrid, corpus: Any, tokens_per_batch: int) -> Iterator[WindowBatch]:
    """Yield the windows in batches of at most ``tokens_per_batch`` positions, the longest first.

    Windows that are padded to the same length share batches, in the order of the grid. ``corpus``
    has ``read_tokens`` and ``eos_token_id``: a corpus, or a lens with its own tokens.
    """
    rounded = -(-grid.length // PADDING_MULTIPLE) * PADDING_MULTIPLE
    padded = np.minimum(rounded, grid.window)
    for width in np.unique(padded)[::-1].tolist():
        members, rows = np.flatnonzero(padded == width), max(1, tokens_per_batch // width)
        for first in range(0, len(members), rows):
            yield batch_of(grid, corpus, members[first : first + rows], width)


def batch_of(grid: WindowGrid, corpus: Any, members: np.ndarray, width: int) -> WindowBatch:
    """Return the windows ``members`` of a grid as one batch, padded to ``width``."""
    import torch

    shape = len(members), width
    input_ids = np.full(shape, corpus.eos_token_id, np.int64)
    positions, owned = np.full(shape, -1, np.int64), np.zeros(shape, bool)
    for row, member in enumerate(members):
        start, length = int(grid.start[member]), int(grid.length[member])
        input_ids[row, :length] = corpus.read_tokens(start, length)
        if grid.skip[member]:
            input_ids[row, : len(grid.prefix)] = grid.prefix
        owned[row, grid.skip[member] : length] = True
        positions[row, :length] = np.arange(start, start + length)
    arrays = input_ids, positions >= 0, owned, positions, grid.document[members]
    return WindowBatch(*map(torch.from_numpy, arrays))


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How many blocks a corpus has, and in which order they are read.

    A block of documents is the unit of work of an index, however many processes work on it. Block
    b holds the documents that start at positions b·size to (b+1)·size − 1. The s-th block read is
    s·step mod count, with a step near count/φ coprime to count, so that the first blocks are spread
    evenly over the corpus.
    """

    size: int
    count: int
    step: int

    @classmethod
    def for_tokens(cls, num_tokens: int) -> BlockOrder:
        """Return the order for a corpus of ``num_tokens``; block sizes are powers of two."""
        target = max(1, num_tokens // TARGET_BLOCKS)
        size = min(MAX_BLOCK, max(MIN_BLOCK, 1 << (target.bit_length() - 1)))
        count = max(1, -(-num_tokens // size))
        step = max(1, round(count * GOLDEN))
        while math.gcd(step, count) != 1:
            step += 1
        return cls(size, count, step)

    def block(self, slot: int) -> int:
        """Return which block is read as the ``slot``-th, from 0."""
        return slot * self.step % self.count

    def slots(self, shard: int, shards: int) -> range:
        """Return the slots of the ``shard``-th of ``shards`` parts, from 0."""
        return range(self.count * shard // shards, self.count * (shard + 1) // shards)

    def windows(
        self, slot: int, corpus: Corpus, split: Split, window: int, stride: int
    ) -> WindowGrid:
        """Lay windows over the documents of a split in the ``slot``-th block."""
        first = self.block(slot) * self.size
        in_block = np.searchsorted(corpus.starts, [first, first + self.size]).tolist()
        documents = corpus.split(split, *in_block)
        return document_windows(
            documents, corpus.starts, corpus.lengths, window, stride, corpus.prefix
        )


def split_counts(corpus: Corpus, split: Split) -> tuple[int, int]:
    """Return the number of documents and tokens of a split."""
    counts, heldout = corpus.meta["counts"], corpus.meta["heldout"]
    documents, tokens = (
        {"all": counts[name], "heldout": heldout[name], "train": counts[name] - heldout[name]}
        for name in ("documents", "tokens")
    )
    return documents[split], tokens[split]


@dataclass(frozen=True)
class Sequences:
    """The documents of a split, cut every ``length`` tokens; the last cut may be shorter.

    Blocks are read in an order that is spread evenly over the corpus, and so are the first
    ``max_tokens``; None reads all. Memory is that of a batch.
    """

    corpus: Corpus
    split: Split = "heldout"
    length: int = 256
    max_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are read; the last batch may exceed ``max_tokens``."""
        available = split_counts(self.corpus, self.split)[1]
        return available if self.max_tokens is None else min(available, self.max_tokens)

    def part(self, positions: int) -> dict[str, Any]:
        """Return which part of the corpus this is, of which ``positions`` were read."""
        named = {"path": str(self.corpus.path), "name": self.corpus.name, "split": self.split}
        return named | {"length": self.length, "positions": positions}

    def batches(self) -> Iterator[WindowBatch]:
        """Yield the sequences in batches, block by block."""
        corpus, tokens_read = self.corpus, 0
        order = BlockOrder.for_tokens(corpus.num_tokens)
        for slot in range(order.count):
            grid = order.windows(slot, corpus, self.split, self.length, self.length)
            for batch in window_batches(grid, corpus, PASS_TOKENS):
                if self.max_tokens is not None and tokens_read >= self.max_tokens:
                    return
                yield batch
                tokens_read += int(batch.owned.sum())
        if not tokens_read:
            raise InputError(f"the corpus {corpus.name} has no documents in {self.split!r}.")


def pack(
    corpus: Corpus, documents: np.ndarray, length: int, seed: int, *, share_rows: bool = True
) -> PackedDataset:
    """Pack documents into training rows of ``length`` tokens.

    Each document is cut into pieces of ``length``, which all start with the tokenizer's prefix.
    The remainders of documents share rows by best-fit decreasing. A remainder of one token has
    nothing to predict and is dropped.

    Args:
        corpus: the tokens; they are read row by row.
        documents: document numbers, int64 [n], such as ``corpus.split("train")``.
        length: tokens of a row, at least 2.
        seed: of the order of the rows, and of equally long remainders.
        share_rows: False gives every remainder its own row, padded on the right, for models that
            carry a state from one document of a row into the next.
    """
    prefix = len(corpus.prefix)
    check_whole("the length of a row", length, prefix + 2)
    generator = np.random.default_rng(seed)
    grid = document_windows(documents, corpus.starts, corpus.lengths, length, length, corpus.prefix)
    full = np.flatnonzero(grid.length == length)
    rest = np.flatnonzero((grid.length < length) & (grid.length > prefix + 1))
    rest = generator.permutation(rest)
    rest = rest[np.argsort(-grid.length[rest], kind="stable")]
    bins = best_fit(grid.length[rest].tolist(), length) if share_rows else np.arange(len(rest))
    rows = np.concatenate([np.arange(len(full)), len(full) + bins])
    if not len(rows):
        raise InputError(
            f"There is nothing to train on: none of the {len(documents)} documents has two tokens."
        )
    order = generator.permutation(int(rows.max()) + 1)[rows]
    pieces = np.concatenate([full, rest])[np.argsort(order, kind="stable")]
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(order))])
    return PackedDataset(corpus, grid, pieces, first_piece, share_rows)


def best_fit(sizes: list[int], capacity: int) -> np.ndarray:
    """Return the best-fit bin of each item, int64 [n]: the fullest it fits in, or a new one.

    Sizes are 1 to ``capacity``. In descending order this is best-fit decreasing.
    """
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s is set while some open bin has space s: the tightest fit is one bit operation.
    spaces = 0
    bins = np.empty(len(sizes), dtype=np.int64)
    count = 0
    for item, size in enumerate(sizes):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            chosen = open_bins[space].pop()
            if not open_bins[space]:
                spaces &= ~(1 << space)
        else:
            space, chosen = capacity, count
            count += 1
        bins[item] = chosen
        left = space - size
        if left:
            open_bins[left].append(chosen)
            spaces |= 1 << left
    return bins


@dataclass(frozen=True, eq=False)
class PackedDataset:
    """Rows of ``length`` tokens for training, as a map-style dataset.

    ``dataset[i]`` is a dict of int64 tensors [length], and one of bool:

    - ``input_ids``: the pieces of the row one after another, then end-of-text tokens as padding;
    - ``position_ids``: from 0 within each piece and within the padding. Hugging Face decoders
      derive a block-diagonal mask from it, so that no token attends to another document;
    - ``labels``: ``input_ids``, but −100 on padding and on the first token of each piece (inside
      a document, on the prefix and the first token after it);
    - ``token_mask``: true on tokens, false on padding;
    - ``attention_mask``, unless rows are shared: the same, as int64. In shared rows it would
      keep Hugging Face decoders from deriving the block-diagonal mask.
    """

    _corpus: Corpus
    _grid: WindowGrid
    _pieces: np.ndarray
    _first_piece: np.ndarray
    shared_rows: bool

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    @property
    def length(self) -> int:
        """The number of tokens of a row."""
        return self._grid.window

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the rows, without padding."""
        return int(self._grid.length[self._pieces].sum())

    @property
    def fill(self) -> float:
        """The share of positions that are not padding."""
        return self.num_tokens / (len(self) * self.length)

    def pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the global starts and the lengths of the pieces of a row, int64 [pieces] each."""
        pieces = self._pieces[self._first_piece[index] : self._first_piece[index + 1]]
        return self._grid.start[pieces], self._grid.length[pieces]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        corpus, grid, at = self._corpus, self._grid, 0
        input_ids = np.full(self.length, corpus.eos_token_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        position_ids = np.empty(self.length, dtype=np.int64)
        for piece in self._pieces[self._first_piece[index] : self._first_piece[index + 1]]:
            start, size, skip = (int(a[piece]) for a in (grid.start, grid.length, grid.skip))
            input_ids[at : at + size] = corpus.tokens(start, size)
            input_ids[at : at + skip] = corpus.prefix[:skip]
            labels[at + skip + 1 : at + size] = input_ids[at + skip + 1 : at + size]
            position_ids[at : at + size] = np.arange(size)
            at += size
        position_ids[at:] = np.arange(self.length - at)
        arrays = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        row = {name: torch.from_numpy(array) for name, array in arrays.items()}
        row["token_mask"] = torch.arange(self.length) < at
        if not self.shared_rows:
            row["attention_mask"] = row["token_mask"].long()
        return row
