"""Spans of an answer that occur in the corpus word for word (OLMoTrace, Liu et al. 2025).

From every token on, the longest run of tokens that occurs in some document is found; runs within a
longer one are dropped, long and rare ones come first. They say where a text occurs, not whether the
model took it from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from prismlm.lens.lens import Lens
from prismlm.lens.suffixes import Suffixes

# Tokens of a verbatim span, and the positions named for each.
MIN_SPAN = 5
SPAN_PLACES = 5


@dataclass(frozen=True)
class VerbatimSpan:
    """A span of a text that occurs in the corpus, and lies in no longer one that does."""

    start: int  # its first token, counted from 0 in the text
    length: int  # its tokens
    count: int  # how often it occurs in the documents of the lens
    rarity: float  # −Σ log₂ p over its tokens, with p a token's share of the documents
    # The first places it begins at, ascending global token offsets of the corpus.
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Quote:
    """The text of a verbatim span, and doc_id, title, source, license and position of places."""

    text: str
    start: int  # these as of VerbatimSpan
    length: int
    count: int
    rarity: float
    places: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        return asdict(self)


def quotes(
    ids: Sequence[int], tokens: Sequence[str], start: int, lens: Lens, limit: int
) -> list[Quote]:
    """Return the verbatim spans of a text from a token on; of the same words, the first span."""
    assert lens.suffixes is not None
    distinct: dict[str, VerbatimSpan] = {}
    for span in verbatim_spans(ids, lens.suffixes, start):
        distinct.setdefault("".join(tokens[span.start : span.start + span.length]), span)

    def place(position: int) -> dict[str, Any]:
        facts = lens.cells.facts(int(lens.cells.document_of(np.array([position]))[0]))
        names = ("doc_id", "title", "source", "license")
        return {name: facts[name] for name in names} | {"position": position}

    return [
        Quote(text, s.start, s.length, s.count, s.rarity, tuple(map(place, s.positions)))
        for text, s in list(distinct.items())[:limit]
    ]


def verbatim_spans(
    ids: Sequence[int], suffixes: Suffixes, start: int = 0, *, minimum: int = MIN_SPAN
) -> list[VerbatimSpan]:
    """Return the longest spans of a text that occur in the corpus: by length, rarity and start.

    They have ``minimum`` tokens or more, begin at ``start`` or later, and may overlap; none lies in
    another.
    """
    tokens = np.asarray(ids, dtype=np.int64)

    @cache
    def surprise(token: int) -> float:
        return -math.log2(suffixes.count([token]) / len(suffixes))

    spans: list[VerbatimSpan] = []
    end = start
    for first in range(start, len(tokens)):
        length, count = suffixes.longest_prefix(tokens[first:])
        # Ends never decrease, so a span lies in an earlier one unless it ends later.
        if first + length <= end:
            continue
        end = first + length
        if length >= minimum:
            span = tokens[first:end]
            rarity = math.fsum(map(surprise, span.tolist()))
            places = tuple(suffixes.find(span, SPAN_PLACES).tolist())
            spans.append(VerbatimSpan(first, length, count, rarity, places))
    return sorted(spans, key=lambda span: (-span.length, -span.rarity, span.start))
