"""Tokens merged to words, so that no part of a character is ever shown by itself."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

APOSTROPHES = "'’"
DITTO = "″"
"""Stands for a token that holds only more bytes of the character before it."""


@dataclass(frozen=True)
class WordedText:
    """A stretch of text as T tokens and as words of one token or more.

    Attributes:
        words: one after the other they are the text; a special token around it is an empty word.
        counts: how many tokens each word has; they sum to T.
        tokens: the characters that each token touches, all of each; :data:`DITTO` where a token
            has nothing but more bytes of the last one's.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    tokens: tuple[str, ...]

    @cached_property
    def word_of(self) -> tuple[int, ...]:
        """The number of each token's word."""
        return tuple(word for word, count in enumerate(self.counts) for _ in range(count))

    def around(self, token: int, words: int) -> tuple[str, str, str]:
        """Return what stands before a token's word, the word, and what stands after it.

        Args:
            token: its place.
            words: the most words on either side.

        Raises:
            InputError: there is no such token.
        """
        if not 0 <= token < len(self.tokens):
            raise InputError(f"there is no token {token}: the text has {len(self.tokens)}.")
        place = self.word_of[token]
        before, after = self.words[max(0, place - words) : place], self.words[place + 1 :]
        return "".join(before), self.words[place], "".join(after[:words])

    def largest(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the largest of each word's tokens' values.

        Raises:
            InputError: not one value for each token.
        """
        if len(values) != len(self.tokens):
            raise InputError(f"{len(values)} values for {len(self.tokens)} tokens.")
        ends = list(accumulate(self.counts))
        return tuple(
            max(values[end - count : end]) for end, count in zip(ends, self.counts, strict=True)
        )


def worded(text: str, spans: Int64[np.ndarray, "T 2"]) -> WordedText:
    """Return tokens and words of a text.

    Letters, digits and marks without a space between them are one word, with an apostrophe inside
    it; any other token is a word by itself. Letters without case, such as Chinese, are not joined:
    they are written without spaces. Tokens that share a character always go together.

    Args:
        text: all that the spans point into.
        spans: start and end of each token's characters, ascending, as :meth:`Corpus.spans`.
    """
    words: list[str] = []
    counts: list[int] = []
    tokens: list[str] = []
    shown = int(spans[0, 0]) if len(spans) else 0
    for first, last in spans.tolist():
        only_more_bytes = first < last <= shown
        tokens.append(DITTO if only_more_bytes and tokens else text[first:last])
        if words and _goes_on(text, first, last, shown):
            counts[-1] += 1
        else:
            words.append("")
            counts.append(1)
        # From where the last token ended: a tokenizer may leave spaces to none.
        words[-1] += text[shown:last]
        shown = max(shown, last)
    return WordedText(tuple(words), tuple(counts), tuple(tokens))


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], Int64[np.ndarray, "T 2"]]:
    """Return :func:`prismlm.corpus.encode.encode_spans` of a text that is not empty.

    Raises:
        InputError: the text is empty, or the tokenizer is not a fast one.
    """
    from prismlm.corpus.encode import encode_spans, encode_text

    ids, spans = encode_spans(tokenizer, text)
    if len(ids) == len(encode_text(tokenizer, "")):
        raise InputError("the text is empty: give at least one token to read.")
    return ids, spans


def _goes_on(text: str, first: int, last: int, shown: int) -> bool:
    """Say whether a token goes on with the word that ends at ``shown``."""
    if first != shown:
        return first < shown
    return 0 < first < last and _within_word(text, first)


def _within_word(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place]
    if unicodedata.category(after).startswith("M"):
        return True
    if after in APOSTROPHES:
        return _letter(before) and _letter(text[place + 1 : place + 2])
    if before in APOSTROPHES:
        return _letter(text[max(0, place - 2) : place - 1]) and _letter(after)
    return _letter(before) and _letter(after)


def _letter(letter: str) -> bool:
    if not letter:
        return False
    category = unicodedata.category(letter)
    return letter == "_" or (category[0] in "LNM" and category != "Lo")
