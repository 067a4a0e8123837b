"""The text of kept sequences: their words, and the documents that they are from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prismlm.corpus.words import WordedText, worded

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.instruments.channels.top_sequences import ChannelSequence


@dataclass(frozen=True)
class PassageOrigin:
    """Where a passage is from; None is what the corpus does not know."""

    doc_id: str
    title: str | None
    source: str | None
    domain: str | None
    license: str | None
    url: str | None


@dataclass(frozen=True)
class Passage:
    """A sequence of a corpus with its text.

    Attributes:
        start: corpus position of its first token.
        offset: of its first token in its document.
        document: that document.
        text: its words and tokens.
    """

    start: int
    offset: int
    document: PassageOrigin
    text: WordedText


def read_passages(corpus: Corpus, sequences: Iterable[ChannelSequence]) -> dict[int, Passage]:
    """Return each sequence's passage, by corpus position of its first token.

    Each document is read and encoded once.

    Raises:
        FormatError: the corpus is damaged, or its tokenizer no longer gives its tokens.
    """
    wanted: dict[int, set[tuple[int, int]]] = {}
    for sequence in sequences:
        wanted.setdefault(sequence.document, set()).add((sequence.start, sequence.length))
    numbers = sorted(wanted)
    if not numbers:
        return {}
    rows = corpus.documents.take(np.array(numbers, dtype=np.int64)).to_pylist()
    found: dict[int, Passage] = {}
    for number, row, spans in zip(numbers, rows, corpus.spans_batch(numbers), strict=True):
        text = corpus.text(number)
        document = PassageOrigin(**{name: row[name] for name in PassageOrigin.__dataclass_fields__})
        for start, length in sorted(wanted[number]):
            offset = start - row["start"]
            words = worded(text, spans[offset : offset + length])
            found[start] = Passage(start, offset, document, words)
    return found
