"""Training rows: pieces of documents, packed with little padding, or one piece per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prismlm.corpus.windows import WindowGrid, document_windows
from prismlm.errors import InputError

if TYPE_CHECKING:
    import torch

    from prismlm.corpus.store import Corpus

IGNORED = -100


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
    if length < prefix + 2:
        raise InputError(
            f"Rows of {length} tokens: expected at least {prefix + 2}, one to predict the next."
        )
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
