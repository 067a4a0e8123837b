"""Where tokens lie in a text, from the bytes that each stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The upper bits of a byte that goes on with a character of UTF-8.
_CONTINUED, _MASK = 0x80, 0xC0


class TokenBytes:
    """The tokens of a byte-level tokenizer as bytes.

    Args:
        values: of each token, by its id.
    """

    def __init__(self, values: list[bytes]) -> None:
        self._values = values
        self._lengths = np.array([len(value) for value in values], dtype=np.int64)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes | None:
        """Return those of a tokenizer, or None for one that is not byte-level."""
        from tokenizers import decoders

        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            return None
        byte_of = byte_alphabet()
        vocabulary = tokenizer.get_vocab()
        values = [b""] * (max(vocabulary.values(), default=-1) + 1)
        added = tokenizer.get_added_tokens_decoder()
        for token, number in vocabulary.items():
            plain = number in added or not byte_of.keys() >= set(token)
            values[number] = token.encode() if plain else bytes(map(byte_of.__getitem__, token))
        return cls(values)

    def spans(self, tokens: np.ndarray, text: str) -> np.ndarray | None:
        """Return the characters that each token touches, int64 [T, 2], start and end.

        The bytes of a character that takes several tokens all have that character's span. None
        where the tokens do not spell the text.
        """
        try:
            spelled = b"".join(map(self._values.__getitem__, tokens.tolist()))
        except IndexError:
            return None
        if spelled != text.encode():
            return None
        ends = np.cumsum(self._lengths[tokens])
        characters = np.cumsum((np.frombuffer(spelled, np.uint8) & _MASK) != _CONTINUED)
        return np.stack([characters[ends - self._lengths[tokens]] - 1, characters[ends - 1]], 1)


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write bytes with.

    Bytes that can be seen are written as themselves, the others in order with the characters from
    256 on.
    """
    from tokenizers import pre_tokenizers

    shown = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [ord(character) for character in shown if ord(character) < 256]
    return dict(zip(shown, own + sorted(set(range(256)) - set(own)), strict=True))
