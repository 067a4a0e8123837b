"""Text of a lens: sentences around tokens, and documents decoded from the lens's own tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.encode import TokenBytes, around_text, encoder_of
from prismlm.corpus.pieces import pieces_of
from prismlm.lens.cells import Cells
from prismlm.lens.suffixes import StoredTokens

# Characters kept on either side of a token in a sentence without end.
MAX_CHARACTERS = 240
# The end of a sentence; special tokens of chats and texts end one too.
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+|<\|[^|<>\s]*\|>|</?s>")


class Around(NamedTuple):
    """A token of the corpus with the text before and after it."""

    before: str
    token: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.token}{self.after}"


def sentence_around(text: str, left: int, right: int) -> Around:
    """Return the sentence around a span of a text, cut to 240 characters on either side."""
    begin = max(0, left - MAX_CHARACTERS)
    # A token may start with the space that ends the previous sentence.
    first = next((i for i in range(left, right) if not text[i].isspace()), left)
    ends = [match.end() for match in _END.finditer(text, begin, first)]
    begin = min(ends[-1], left) if ends else begin
    end = min(len(text), right + MAX_CHARACTERS)
    stop = _END.search(text, right, end)
    return Around(text[begin:left], text[left:right], text[right : stop.start() if stop else end])


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the spans of the sentences of a text, without surrounding whitespace."""
    edges = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    spans: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        sentence = text[begin:end]
        if words := sentence.strip():
            begin += len(sentence) - len(sentence.lstrip())
            spans.append((begin, begin + len(words)))
    return spans


def joined(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strip leading whitespace of ascending spans, and join those with only whitespace between."""
    result: list[tuple[int, int]] = []
    for begin, end in spans:
        word = text[begin:end]
        begin += len(word) - len(word.lstrip())
        if begin == end:
            continue
        if result and not text[result[-1][1] : begin].strip():
            begin = result.pop()[0]
        result.append((begin, end))
    return result


class OwnText:
    """Tokens and text of the documents of a lens, with the interface of a corpus for reading.

    The decoded text differs where the tokenizer normalises, such as by lowercasing.
    """

    def __init__(
        self, cells: Cells, tokens: StoredTokens, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._cells, self._tokenizer = cells, tokenizer
        self.starts, self._tokens = cells.starts, tokens
        self.prefix, self._suffix = around_text(tokenizer)
        self.eos_token_id = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        self._token_bytes = TokenBytes.from_tokenizer(encoder_of(tokenizer).text)
        self._decoded = lru_cache(2)(self._decode)

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Return successive tokens from a global position on."""
        return self._tokens.tokens(start, length)

    def document_at(self, position: int) -> int:
        """Return the number of the document that a global position lies in."""
        return int(self._cells.document_of(np.array([position]))[0])

    def text(self, number: int) -> str:
        """Return the text of a document."""
        return self._decoded(number)[0]

    def spans(self, number: int) -> np.ndarray:
        """Return the span of each token of a document in its text, int64 [length, 2]."""
        return self._decoded(number)[1]

    def _decode(self, number: int) -> tuple[str, np.ndarray]:
        length = int(self._cells.lengths[number])
        ids = self.read_tokens(int(self.starts[number]), length)[:-1].tolist()
        before = len(self.prefix) * (ids[: len(self.prefix)] == self.prefix)
        after = len(self._suffix) * (ids[len(ids) - len(self._suffix) :] == self._suffix)
        tokens = np.array(ids[before : len(ids) - after], dtype=np.int64)
        pieces = pieces_of(self._tokenizer, tokens.tolist())
        text = "".join(piece.shown for piece in pieces)
        spans = None if self._token_bytes is None else self._token_bytes.spans(tokens, text)
        if spans is None:
            ends = np.cumsum([len(piece.shown) for piece in pieces])
            begins = ends - [len(piece.text) if piece.number == 1 else 0 for piece in pieces]
            spans = np.stack([begins, ends], axis=1)
        end = np.full((after + 1, 2), len(text))
        return text, np.concatenate([np.zeros((before, 2), np.int64), spans, end])
