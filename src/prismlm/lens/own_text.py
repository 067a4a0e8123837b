"""The documents of a lens from the tokens that it holds itself: where its corpus is not at hand.

A suffix array holds them in order. Cells that keep every position hold the token at each, so the
order is found by their positions. What is decoded is the text but for what a tokenizer changes
before it reads, such as capitals in a vocabulary without them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.encode import TokenBytes, around_text, encoder_of
from prismlm.corpus.pieces import pieces_of
from prismlm.lens.cells import Cells
from prismlm.lens.suffixes import Suffixes


class OwnText:
    """Tokens and text of the documents of a lens, by the positions of its corpus.

    It has what :class:`~prismlm.corpus.store.Corpus` has for reading around a position. Cells must
    hold every position where there is no suffix array.
    """

    def __init__(
        self, cells: Cells, suffixes: Suffixes | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._cells, self._suffixes, self._tokenizer = cells, suffixes, tokenizer
        self.starts = cells.starts
        self.prefix, self._suffix = around_text(tokenizer)
        self.eos_token_id = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        self._token_bytes = TokenBytes.of(encoder_of(tokenizer).text)
        self._decoded = lru_cache(2)(self._decode)

    def document_at(self, position: int) -> int:
        """Return the number of the document that a global position lies in."""
        return int(self._cells.document_of(np.array([position]))[0])

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Return tokens of one document, int64 [length]."""
        if self._suffixes is not None:
            return self._suffixes.tokens(start, length)
        return self._cells.tokens(start, length, self.eos_token_id)

    def text(self, number: int) -> str:
        """Return the text of a document."""
        return self._decoded(number)[0]

    def spans(self, number: int) -> np.ndarray:
        """Return where each token of a document lies in its text: int64 [length, 2]."""
        return self._decoded(number)[1]

    def _decode(self, number: int) -> tuple[str, np.ndarray]:
        length = int(self._cells.documents["length"][number].as_py())
        ids = self.read_tokens(int(self.starts[number]), length)[:-1].tolist()
        before = len(self.prefix) * (ids[: len(self.prefix)] == self.prefix)
        after = len(self._suffix) * (ids[len(ids) - len(self._suffix) :] == self._suffix)
        own = np.array(ids[before : len(ids) - after], dtype=np.int64)
        pieces = pieces_of(self._tokenizer, own.tolist())
        text = "".join(piece.shown for piece in pieces)
        spans = None if self._token_bytes is None else self._token_bytes.spans(own, text)
        if spans is None:
            ends = np.cumsum([len(piece.shown) for piece in pieces])
            begins = ends - [len(piece.text) if piece.number == 1 else 0 for piece in pieces]
            spans = np.stack([begins, ends], axis=1)
        end = np.full((after + 1, 2), len(text))
        return text, np.concatenate([np.zeros((before, 2), np.int64), spans, end])
