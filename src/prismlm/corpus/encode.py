"""Text and chats as tokens, with special tokens only where the model's own tokenizer puts them.

Around a text they are those of ``tokenizer(text)``, in a chat those that its template writes. What
is spelt like one in a text or a message is text: ``<s>`` is three characters, and nobody's words
can end a turn of a chat and begin another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int64

from prismlm.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    Spans = Int64[np.ndarray, "T 2"]

# Stands before text that does not begin a chat: some tokenizers begin with a space.
BEFORE = "\U0010fffd"
# The upper bits of a byte that continues a character of UTF-8.
CONTINUED, UPPER_BITS = 0x80, 0xC0


def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer's own call puts before a text and after it."""
    call: Any = tokenizer
    bare = call("a", add_special_tokens=False, verbose=False)["input_ids"]
    whole = call("a", verbose=False)["input_ids"]
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return list(whole[:at]), list(whole[at + len(bare) :])
    return [], []


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True, end: bool = True
) -> list[int]:
    """Return the tokens of a text as ``tokenizer(text)`` does; special tokens in it are text.

    Args:
        tokenizer: of the model that is to read it.
        text: plain text; for a chat see :func:`prismlm.corpus.chat.encode_chat`.
        start, end: whether what the tokenizer puts before and after a text goes around it.
    """
    return encode_spans(tokenizer, text, start=start, end=end)[0]


def encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True, end: bool = True
) -> tuple[list[int], Spans]:
    """Return :func:`encode_text` with the characters of each token; none of those around it."""
    prefix, suffix = around_text(tokenizer) if start or end else ([], [])
    prefix, suffix = prefix if start else [], suffix if end else []
    encoding = encoder_of(tokenizer).text.encode(text, add_special_tokens=False)
    spans = [(0, 0)] * len(prefix) + encoding.offsets + [(len(text),) * 2] * len(suffix)
    return [*prefix, *encoding.ids, *suffix], np.array(spans, dtype=np.int64).reshape(-1, 2)


def text_encoder(backend: Tokenizer, eos_token: str | None, *, marks: bool = False) -> Tokenizer:
    """Return a copy of ``backend`` that reads special tokens inside a text as ordinary text.

    A document that spells out ``<|endoftext|>`` must not end there. With ``marks`` they are special
    tokens, as in the text that a chat template makes. The copy neither cuts nor pads nor adds
    tokens, and its offsets keep the spaces that belong to a token.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    encoder = Tokenizer.from_str(backend.to_str())
    encoder.no_truncation()
    encoder.no_padding()
    encoder.post_processor = cast(Any, processors.Sequence([]))
    if eos_token is not None:
        # An end token that was added as an ordinary one would still be matched in the text.
        encoder.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    encoder.encode_special_tokens = not marks
    return encoder


class Mark(NamedTuple):
    """A special token, and the characters of a text that it is, from ``start`` to ``end``."""

    id: int
    start: int
    end: int


class Encoder:
    """How a tokenizer reads a text, and what a chat template wrote.

    Attributes:
        text: reads special tokens as text.
    """

    def __init__(self, backend: Tokenizer, eos_token: str | None) -> None:
        self.text = text_encoder(backend, eos_token)
        self._given = backend, eos_token

    @cached_property
    def chat(self) -> Tokenizer:
        """Reads special tokens as special tokens, whoever wrote them."""
        return text_encoder(*self._given, marks=True)

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return TokenBytes.of(self.text)

    @cached_property
    def _after_mark(self) -> Tokenizer:
        from tokenizers import AddedToken

        encoder = text_encoder(*self._given)
        encoder.add_tokens([AddedToken(BEFORE, normalized=False)])
        return encoder

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """What is spelt like a special token."""
        known = self.text.get_added_tokens_decoder().values()
        spelt = sorted((token.content for token in known if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spelt)) or "(?!)")

    @cached_property
    def _special(self) -> set[int]:
        known = self.text.get_added_tokens_decoder()
        # What stands for a character without a token may be special too, and is no mark.
        unknown = self.text.encode(BEFORE, add_special_tokens=False).ids
        return {number for number, token in known.items() if token.special} - set(unknown)

    def marks_in(self, text: str) -> list[Mark]:
        """Return all special tokens of a chat, whoever wrote them."""
        encoding = self.chat.encode(text, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [Mark(number, *span) for number, span in found if number in self._special]

    def encode_chat(self, text: str, marks: Sequence[Mark]) -> list[int]:
        """Return the tokens of a chat in which these marks alone are the template's."""
        found: list[int] = []
        done = 0
        for mark in marks:
            found += [*self._between(text, done, mark.start)[0], mark.id]
            done = mark.end
        return found + self._between(text, done, len(text))[0]

    def spans(self, text: str, tokens: np.ndarray) -> Spans | None:
        """Return the characters of each token of a text or chat; None if they are not its tokens.

        Which marks of a chat are the template's follows from the tokens between them. Bytes, where
        tokens are such, are found in a tenth of the time that it takes to encode the text again.
        """
        spelt = None if self._bytes is None else self._bytes.spans(tokens, text)
        if spelt is not None:
            return spelt
        encoding, ids = self.text.encode(text, add_special_tokens=False), tokens.tolist()
        if encoding.ids == ids:
            return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        candidates, found = self.marks_in(text), list[tuple[int, int]]()
        done = 0
        for part, number in self._split(ids):
            ends = [mark for mark in candidates if mark.id == number and mark.start >= done]
            for end in ends if number is not None else [Mark(-1, len(text), len(text))]:
                own, spans = self._between(text, done, end.start)
                if own == part:
                    break
            else:
                return None
            found += spans if number is None else [*spans, (end.start, end.end)]
            done = end.end
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def _split(self, ids: Sequence[int]) -> Iterator[tuple[list[int], int | None]]:
        """Yield the tokens before each special one with that, and those after the last."""
        part: list[int] = []
        for number in ids:
            if number in self._special:
                yield part, number
                part = []
            else:
                part.append(number)
        yield part, None

    def _between(self, text: str, start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return tokens and spans of the characters between two marks of a chat, or its ends."""
        part = text[start:end]
        if start == 0 or not part or BEFORE in part:
            encoding = self.text.encode(part, add_special_tokens=False)
            by, ids, spans = start, encoding.ids, encoding.offsets
        else:
            encoding = self._after_mark.encode(BEFORE + part, add_special_tokens=False)
            by, ids, spans = start - 1, encoding.ids[1:], encoding.offsets[1:]
        return ids, [(first + by, last + by) for first, last in spans]


ENCODERS: WeakKeyDictionary[Any, tuple[Any, Encoder]] = WeakKeyDictionary()


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return the encoder of a tokenizer, which is kept while that stays as it is."""
    state = len(tokenizer), tokenizer.eos_token
    known, encoder = ENCODERS.get(tokenizer, (None, None))
    if encoder is None or known != state:
        check_fast(tokenizer, tokenizer.name_or_path)
        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
        encoder = Encoder(backend, cast("str | None", tokenizer.eos_token))
        ENCODERS[tokenizer] = state, encoder
    return encoder


def check_fast(tokenizer: Any, name: str) -> None:
    """Raise InputError unless the tokenizer is a fast one."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(
            f"The tokenizer {name!r} is not a fast tokenizer, so it cannot say where its tokens "
            "lie in the text. Use one with a tokenizer.json."
        )


class TokenBytes:
    """The tokens of a byte-level tokenizer as bytes, by their ids."""

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

    def spans(self, tokens: np.ndarray, text: str) -> Spans | None:
        """Return the characters that each token touches, start and end.

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
        characters = np.cumsum((np.frombuffer(spelled, np.uint8) & UPPER_BITS) != CONTINUED)
        return np.stack([characters[ends - self._lengths[tokens]] - 1, characters[ends - 1]], 1)


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write bytes with.

    Printable bytes are written as themselves, the others in order as the characters from 256 on.
    """
    from tokenizers import pre_tokenizers

    shown = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [ord(character) for character in shown if ord(character) < 256]
    return dict(zip(shown, own + sorted(set(range(256)) - set(own)), strict=True))
