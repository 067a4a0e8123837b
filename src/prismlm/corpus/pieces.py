"""Tokens as readers are shown them: characters whole, and bytes that are none by their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from prismlm.corpus.encode import byte_alphabet

# What stands for bytes that are no character; and the most tokens that share characters.
BROKEN, MOST_JOINED = "\ufffd", 12
# A byte as SentencePiece spells it where it knows no token for a character.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# How a vocabulary spells the space that a token begins with.
SPACES = ("Ġ", "▁")


class Piece(NamedTuple):
    """What a token is to a reader: a text of its own, or a part of what several tokens spell.

    Attributes:
        text: whole characters, however many tokens they take.
        number, of: which of these tokens it is, from 1.
    """

    text: str
    number: int = 1
    of: int = 1

    @property
    def label(self) -> str:
        """The text, and which part of it this is if there are several: ``東 2/3``."""
        return self.text if self.of == 1 else f"{self.text} {self.number}/{self.of}"

    @property
    def shown(self) -> str:
        """The text at its first token and nothing at the others, so that pieces join to a text."""
        return self.text if self.number == 1 else ""


def visible(token: str) -> str:
    """Return a token with the whitespace at its ends, or all it has, made visible."""
    marks = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})
    inner = token.strip(" ")
    if not inner:
        return "␣" * len(token) if token else "∅"
    before, after = token[: token.index(inner)], token[token.rindex(inner) + len(inner) :]
    return ("·" * len(before) + inner + "·" * len(after)).translate(marks)


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[Piece]:
    """Return each token as readers are shown it: those that share a character go together."""
    found: list[Piece] = []
    while len(found) < len(ids):
        first, count = len(found), 1
        alone = text = decode_token(tokenizer, ids[first])
        most = min(MOST_JOINED, len(ids) - first)
        while BROKEN in text and count < most:
            count += 1
            text = decode_token(tokenizer, *ids[first : first + count])
        if BROKEN in text:
            text, count = alone, 1
        found += [Piece(text, number, count) for number in range(1, count + 1)]
    return found


def decode_token(tokenizer: PreTrainedTokenizerBase, *tokens: int) -> str:
    """Return tokens in words: special tokens as they are spelt, nothing cleaned up.

    The space that the first begins with stays, which SentencePiece's decoders drop.
    """
    if tokenizer.is_fast:
        # What the lines below come down to, at a third of the time.
        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
        text = str(backend.decode(list(tokens), skip_special_tokens=False))
        first = backend.id_to_token(tokens[0])
    else:
        text = str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
        first = tokenizer.convert_ids_to_tokens(tokens[0])
    return " " + text if str(first).startswith(SPACES) and not text[:1].isspace() else text


def token_alone(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token that stands in no text: one that is a part of a character as ``‹E2 80›``."""
    text = decode_token(tokenizer, token)
    if BROKEN not in text:
        return text
    data = _bytes(str(tokenizer.convert_ids_to_tokens(token)))
    try:
        return data.decode() if data else text
    except UnicodeDecodeError:
        return f"‹{data.hex(' ').upper()}›"


def _bytes(token: str) -> bytes:
    """Return the bytes that a vocabulary spells as a token; none where it spells no bytes."""
    if byte := BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    byte_of = byte_alphabet()
    return bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else b""
