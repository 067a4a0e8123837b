"""Tokens for display: as pieces of whole characters, and merged to words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.encode import byte_level_bytes, encode_spans
from prismlm.errors import InputError

# The replacement character for invalid bytes; and the maximum number of tokens of a piece.
BROKEN, MOST_JOINED = "\ufffd", 12
# A byte in vocabularies with byte fallback, as in SentencePiece.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# A leading space in vocabularies.
SPACES = ("Ġ", "▁")
APOSTROPHES = "'’"
# Shown for a token that only continues the last character of the token before.
DITTO = "″"


@dataclass(frozen=True)
class Piece:
    """The display form of a token: a text, or part ``number`` of ``count`` tokens that spell it."""

    text: str
    number: int = 1
    count: int = 1

    @property
    def label(self) -> str:
        """The text, with the part if there are several: ``東 2/3``."""
        return self.text if self.count == 1 else f"{self.text} {self.number}/{self.count}"

    @property
    def shown(self) -> str:
        """The text at its first token and "" at the others, so that pieces join to a text."""
        return self.text if self.number == 1 else ""


def visible(token: str) -> str:
    """Return a token with leading and trailing whitespace made visible."""
    marks = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})
    inner = token.strip(" ")
    if not inner:
        return "␣" * len(token) if token else "∅"
    before, after = token[: token.index(inner)], token[token.rindex(inner) + len(inner) :]
    return ("·" * len(before) + inner + "·" * len(after)).translate(marks)


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[Piece]:
    """Return the display form of each token; tokens that share a character share a text."""
    pieces: list[Piece] = []
    while len(pieces) < len(ids):
        first, count = len(pieces), 1
        alone = text = decode_token(tokenizer, ids[first])
        while BROKEN in text and count < min(MOST_JOINED, len(ids) - first):
            count += 1
            text = decode_token(tokenizer, *ids[first : first + count])
        if BROKEN in text:
            text, count = alone, 1
        pieces += [Piece(text, number, count) for number in range(1, count + 1)]
    return pieces


def decode_token(tokenizer: PreTrainedTokenizerBase, *tokens: int) -> str:
    """Decode tokens, special ones included, without clean-up.

    The leading space, which SentencePiece's decoders drop, is restored.
    """
    # A third of the time of tokenizer.decode.
    backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
    text = str(backend.decode(list(tokens), skip_special_tokens=False))
    first = backend.id_to_token(tokens[0])
    return " " + text if str(first).startswith(SPACES) and not text[:1].isspace() else text


def token_alone(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a single token; bytes that are not a character as ``‹E2 80›``."""
    text = decode_token(tokenizer, token)
    if BROKEN not in text:
        return text
    data = _bytes(str(tokenizer.convert_ids_to_tokens(token)))
    try:
        return data.decode() if data else text
    except UnicodeDecodeError:
        return f"‹{data.hex(' ').upper()}›"


def _bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level or byte-fallback vocabulary, else b""."""
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else byte_level_bytes(token)


@dataclass(frozen=True)
class TokenWords:
    """A text as T tokens and as words of one token or more.

    Attributes:
        words: their concatenation is the text; special tokens around it are empty words.
        counts: the number of tokens of each word; they sum to T.
        tokens: the characters that each token touches; :data:`DITTO` for one that only continues
            the last character of the token before.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    tokens: tuple[str, ...]

    @cached_property
    def word_of(self) -> tuple[int, ...]:
        """The index of each token's word."""
        return tuple(word for word, count in enumerate(self.counts) for _ in range(count))


def token_words(text: str, spans: Int64[np.ndarray, "T 2"]) -> TokenWords:
    """Merge the tokens of a text to words.

    Consecutive letters, digits and marks are one word, including inner apostrophes; any other
    token is a word by itself. Letters without case, such as Chinese, are not merged. Tokens that
    share a character always are.

    Args:
        text: the text that the spans refer to.
        spans: start and end of each token's characters, ascending, as :meth:`Corpus.spans`.
    """
    words, counts, tokens = list[str](), list[int](), list[str]()
    done = int(spans[0, 0]) if len(spans) else 0
    for first, last in spans.tolist():
        tokens.append(DITTO if first < last <= done and tokens else text[first:last])
        if words and (first < done or (0 < first == done < last and _within_word(text, first))):
            counts[-1] += 1
        else:
            words.append("")
            counts.append(1)
        # From the end of the last token: some tokenizers drop spaces.
        words[-1] += text[done:last]
        done = max(done, last)
    return TokenWords(tuple(words), tuple(counts), tuple(tokens))


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], Int64[np.ndarray, "T 2"]]:
    """Encode a text as :func:`encode_spans` does; InputError if it has no tokens."""
    ids, spans = encode_spans(tokenizer, text)
    if len(ids) == len(encode_spans(tokenizer, "")[0]):
        raise InputError("the text is empty: give at least one token to read.")
    return ids, spans


def _within_word(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at]
    if unicodedata.category(after).startswith("M"):
        return True
    if after in APOSTROPHES:
        return _is_letter(before) and _is_letter(text[at + 1 : at + 2])
    if before in APOSTROPHES:
        before = text[max(0, at - 2) : at - 1]
    return _is_letter(before) and _is_letter(after)


def _is_letter(character: str) -> bool:
    category = unicodedata.category(character) if character else "Zs"
    return character == "_" or (category[0] in "LNM" and category != "Lo")
