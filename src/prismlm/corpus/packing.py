"""Training rows: pieces of documents, packed with little padding, or one piece per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

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
    indices = np.asarray(documents, dtype=np.int64)
    generator = np.random.default_rng(seed)
    lengths, starts = corpus.lengths[indices], corpus.starts[indices]
    step = length - prefix
    full = np.maximum(0, lengths - prefix) // step
    rest = lengths - full * step
    number = np.arange(int(full.sum())) - np.repeat(np.cumsum(full) - full, full)
    full_starts = np.repeat(starts, full) + number * step

    usable = generator.permutation(np.flatnonzero(rest > prefix + 1))
    usable = usable[np.argsort(-rest[usable], kind="stable")]
    rest_starts = (starts + full * step)[usable]
    row_of_rest = best_fit(rest[usable].tolist(), length) if share_rows else np.arange(len(usable))

    piece_starts = np.concatenate([full_starts, rest_starts])
    piece_lengths = np.concatenate([np.full(len(full_starts), length), rest[usable]])
    rows = np.concatenate([np.arange(len(full_starts)), len(full_starts) + row_of_rest])
    if not len(rows):
        raise InputError(
            f"There is nothing to train on: none of the {len(indices)} documents has two tokens."
        )
    order = generator.permutation(int(rows.max()) + 1)
    by_row = np.argsort(order[rows], kind="stable")
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(order[rows]))])
    return PackedDataset(
        corpus,
        length,
        piece_starts[by_row],
        piece_lengths[by_row],
        first_piece,
        dropped_tokens=int((rest == prefix + 1).sum()),
        shared_rows=share_rows,
    )


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

    ``dropped_tokens`` is the number of remainders of a single token.
    """

    _corpus: Corpus
    length: int
    _starts: np.ndarray
    _lengths: np.ndarray
    _first_piece: np.ndarray
    dropped_tokens: int
    shared_rows: bool

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the rows, without padding."""
        return int(self._lengths.sum())

    @property
    def fill(self) -> float:
        """The share of positions that are not padding."""
        return self.num_tokens / (len(self) * self.length)

    def pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the global starts and the lengths of the pieces of a row, int64 [pieces] each."""
        pieces = slice(self._first_piece[index], self._first_piece[index + 1])
        return self._starts[pieces], self._lengths[pieces]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        corpus, at = self._corpus, 0
        prefix = corpus.prefix
        input_ids = np.full(self.length, corpus.eos_token_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        position_ids = np.empty(self.length, dtype=np.int64)
        for start, size in zip(*(values.tolist() for values in self.pieces(index)), strict=True):
            input_ids[at : at + size] = corpus.tokens(start, size)
            first = at + 1
            if prefix and start != corpus.starts[corpus.document_at(start)]:
                input_ids[at : at + len(prefix)] = prefix
                first += len(prefix)
            labels[first : at + size] = input_ids[first : at + size]
            position_ids[at : at + size] = np.arange(size)
            at += size
        position_ids[at:] = np.arange(self.length - at)
        arrays = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        row = {name: torch.from_numpy(array) for name, array in arrays.items()}
        row["token_mask"] = torch.arange(self.length) < at
        if not self.shared_rows:
            row["attention_mask"] = row["token_mask"].long()
        return row
