"""Tokens merged to words, so that no part of a character is ever shown by itself."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from prismlm.corpus.encode import encode_spans, encode_text
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
    done = int(spans[0, 0]) if len(spans) else 0
    for first, last in spans.tolist():
        only_more_bytes = first < last <= done
        tokens.append(DITTO if only_more_bytes and tokens else text[first:last])
        if words and (first < done or (0 < first == done < last and _within_word(text, first))):
            counts[-1] += 1
        else:
            words.append("")
            counts.append(1)
        # From where the last token ended: a tokenizer may leave spaces to none.
        words[-1] += text[done:last]
        done = max(done, last)
    return WordedText(tuple(words), tuple(counts), tuple(tokens))


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], Int64[np.ndarray, "T 2"]]:
    """Return :func:`prismlm.corpus.encode.encode_spans` of a text that is not empty."""
    ids, spans = encode_spans(tokenizer, text)
    if len(ids) == len(encode_text(tokenizer, "")):
        raise InputError("the text is empty: give at least one token to read.")
    return ids, spans


def _within_word(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place]
    if unicodedata.category(after).startswith("M"):
        return True
    if after in APOSTROPHES:
        return _letter(before) and _letter(text[place + 1 : place + 2])
    if before in APOSTROPHES:
        before = text[max(0, place - 2) : place - 1]
    return _letter(before) and _letter(after)


def _letter(letter: str) -> bool:
    category = unicodedata.category(letter) if letter else "Zs"
    return letter == "_" or (category[0] in "LNM" and category != "Lo")
