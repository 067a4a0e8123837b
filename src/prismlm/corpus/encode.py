"""Encoding texts and chats, with special tokens only where the tokenizer or its template adds them.

Texts get those of ``tokenizer(text)``, chats those of the chat template. The spelling of a special
token inside a text or message is text: ``<s>`` is three characters, and no message can end its
turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int64

from prismlm.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    Spans = Int64[np.ndarray, "T 2"]

# Prepended to text inside a chat, since some tokenizers add a space before a text.
GUARD = "\U0010fffd"


def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that ``tokenizer(text)`` puts before and after a text."""
    call: Any = tokenizer
    bare = call("a", add_special_tokens=False, verbose=False)["input_ids"]
    ids = call("a", verbose=False)["input_ids"]
    for at in range(len(ids) - len(bare) + 1):
        if ids[at : at + len(bare)] == bare:
            return list(ids[:at]), list(ids[at + len(bare) :])
    return [], []


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True, end: bool = True
) -> list[int]:
    """Encode a plain text as ``tokenizer(text)`` does, except that special tokens in it are text.

    ``start`` and ``end`` say whether to add the special tokens before and after it.
    """
    return encode_spans(tokenizer, text, start=start, end=end)[0]


def encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True, end: bool = True
) -> tuple[list[int], Spans]:
    """Return :func:`encode_text` with each token's span; those of added tokens are empty."""
    prefix, suffix = around_text(tokenizer) if start or end else ([], [])
    prefix, suffix = prefix if start else [], suffix if end else []
    encoding = encoder_of(tokenizer).text.encode(text, add_special_tokens=False)
    spans = [(0, 0)] * len(prefix) + encoding.offsets + [(len(text),) * 2] * len(suffix)
    return [*prefix, *encoding.ids, *suffix], np.array(spans, dtype=np.int64).reshape(-1, 2)


def text_encoder(
    backend: Tokenizer, eos_token: str | None, *, marks: bool = False, guard: bool = False
) -> Tokenizer:
    """Return a copy of ``backend`` that encodes special tokens inside a text as ordinary text.

    With ``marks`` it encodes them as special tokens, as in a rendered chat; with ``guard`` it has
    a token for GUARD. The copy neither truncates nor pads nor adds tokens, and its offsets include
    leading spaces.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    encoder = Tokenizer.from_str(backend.to_str())
    encoder.no_truncation()
    encoder.no_padding()
    encoder.post_processor = cast(Any, processors.Sequence([]))
    if eos_token is not None:
        # Otherwise an end token that is not marked as special would be matched in the text.
        encoder.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    encoder.encode_special_tokens = not marks
    if guard:
        encoder.add_tokens([AddedToken(GUARD, normalized=False)])
    return encoder


class Mark(NamedTuple):
    """A special token and its span in a text."""

    id: int
    start: int
    end: int


class Encoder:
    """Encodes texts and rendered chats; ``text`` encodes special tokens as text."""

    def __init__(self, backend: Tokenizer, eos_token: str | None) -> None:
        self.text = text_encoder(backend, eos_token)
        self._source = backend, eos_token

    @cached_property
    def chat(self) -> Tokenizer:
        """Encodes special tokens as such, whether of the template or in a message."""
        return text_encoder(*self._source, marks=True)

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The bytes of each token, if the tokenizer is byte-level."""
        from tokenizers import decoders

        if not isinstance(self.text.decoder, decoders.ByteLevel):
            return None
        vocabulary, added = self.text.get_vocab(), self.text.get_added_tokens_decoder()
        values = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, number in vocabulary.items():
            values[number] = (number not in added and byte_level_bytes(token)) or token.encode()
        return values

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array([len(value) for value in self._bytes or ()], np.int64)

    @cached_property
    def _guarded(self) -> Tokenizer:
        return text_encoder(*self._source, guard=True)

    @cached_property
    def _special(self) -> set[int]:
        known = self.text.get_added_tokens_decoder()
        # The unknown token may be special, but does not stand for its own spelling.
        unknown = self.text.encode(GUARD, add_special_tokens=False).ids
        return {number for number, token in known.items() if token.special} - set(unknown)

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Matches the spelling of a special token."""
        known = self.text.get_added_tokens_decoder().values()
        spellings = sorted((t.content for t in known if t.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def marks_in(self, text: str) -> list[Mark]:
        """Return all special tokens of a rendered chat, those in messages included."""
        encoding = self.chat.encode(text, add_special_tokens=False)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return [Mark(token, *span) for token, span in tokens if token in self._special]

    def encode_chat(self, text: str, marks: Sequence[Mark] | None) -> list[int]:
        """Encode a rendered chat in which only ``marks``, or all marks, are special tokens."""
        if marks is None:
            return self.chat.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        done = 0
        for mark in marks:
            ids += [*self._between(text, done, mark.start)[0], mark.id]
            done = mark.end
        return ids + self._between(text, done, len(text))[0]

    def byte_spans(self, text: str, tokens: np.ndarray) -> Spans | None:
        """Return the span of each token that is of bytes; None unless they spell the text.

        Tokens that hold only a part of a character have the span of that character.
        """
        values = self._bytes
        if values is None or (tokens.size and tokens.max() >= len(values)):
            return None
        spelled = b"".join(map(values.__getitem__, tokens.tolist()))
        if spelled != text.encode():
            return None
        lengths = self._lengths[tokens]
        ends = np.cumsum(lengths)
        # Bytes 0b10xxxxxx continue a character of UTF-8.
        characters = np.cumsum((np.frombuffer(spelled, np.uint8) & 0xC0) != 0x80)
        return np.stack([characters[ends - lengths] - 1, characters[ends - 1]], 1)

    def spans(self, text: str, tokens: np.ndarray) -> Spans | None:
        """Return the span of each token of a text or chat; None if they are not its tokens.

        Byte-level tokens give them in a tenth of the time of encoding the text again. Which marks
        of a chat are special tokens follows from the tokens between them.
        """
        if (byte_spans := self.byte_spans(text, tokens)) is not None:
            return byte_spans
        encoding, ids = self.text.encode(text, add_special_tokens=False), tokens.tolist()
        if encoding.ids == ids:
            return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        end, spans = Mark(-1, len(text), len(text)), list[tuple[int, int]]()
        candidates = [*self.marks_in(text), end]
        first = done = 0
        for at, token in enumerate([*ids, end.id]):
            if token != end.id and token not in self._special:
                continue
            for mark in candidates:
                if mark.id == token and mark.start >= done:
                    part, part_spans = self._between(text, done, mark.start)
                    if part == ids[first:at]:
                        break
            else:
                return None
            spans += [*part_spans, (mark.start, mark.end)]
            first, done = at + 1, mark.end
        return np.array(spans[:-1], dtype=np.int64).reshape(-1, 2)

    def _between(self, text: str, start: int, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode the characters between two special tokens of a chat; return ids and spans."""
        part = text[start:end]
        if start == 0 or not part or GUARD in part:
            encoding = self.text.encode(part, add_special_tokens=False)
            shift, ids, spans = start, encoding.ids, encoding.offsets
        else:
            encoding = self._guarded.encode(GUARD + part, add_special_tokens=False)
            shift, ids, spans = start - 1, encoding.ids[1:], encoding.offsets[1:]
        return ids, [(first + shift, last + shift) for first, last in spans]


ENCODERS: WeakKeyDictionary[Any, tuple[Any, Encoder]] = WeakKeyDictionary()


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return the encoder of a tokenizer, cached until the tokenizer changes."""
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
            f"The tokenizer {name!r} is not a fast tokenizer, so it has no token offsets. Use one "
            "with a tokenizer.json."
        )


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary spells; b"" for another token."""
    byte_of = _byte_alphabet()
    return bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else b""


@cache
def _byte_alphabet() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
