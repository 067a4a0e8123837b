"""What of a text occurs in the corpus word for word: its longest spans, and where.

After OLMoTrace (Liu et al. 2025): from every token on, the longest run of tokens that occurs in
some document; runs within a longer one are dropped, long and rare ones come first. It says where a
text occurs, not whether the model took it from there.
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

MINIMUM = 5
PLACES = 5


@dataclass(frozen=True)
class VerbatimSpan:
    """A span of a text that occurs in the corpus token for token, and in no longer one that does.

    Attributes:
        start: its first token, counted from 0 in the text.
        length: its tokens.
        count: how often it occurs in the documents of the lens.
        rarity: −Σ log₂ p over its tokens, p being a token's share of the documents: the bits of
            chance that it takes to draw them one by one.
        positions: the first places it begins at, ascending global token offsets of the corpus.
    """

    start: int
    length: int
    count: int
    rarity: float
    positions: tuple[int, ...]

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.start + self.length


@dataclass(frozen=True)
class Quote:
    """A verbatim span in words, with the documents that it occurs in.

    Attributes:
        text: the span.
        span: where it lies in the text that was asked about, and how often it occurs in the corpus.
        places: doc_id, title, source, license and position of the first places.
    """

    text: str
    span: VerbatimSpan
    places: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        span = asdict(self.span)
        del span["positions"]
        return {"text": self.text, **span, "places": list(self.places)}


def quotes(
    ids: Sequence[int], tokens: Sequence[str], start: int, lens: Lens, limit: int
) -> list[Quote]:
    """Return the verbatim spans of a text from a token on, in words; see :func:`verbatim_spans`.

    The text is given by number and in words. Of spans with the same words, the first is returned.
    """
    assert lens.suffixes is not None
    distinct: dict[str, VerbatimSpan] = {}
    for span in verbatim_spans(ids, lens.suffixes, start):
        distinct.setdefault("".join(tokens[span.start : span.end]), span)

    def place(position: int) -> dict[str, Any]:
        facts = lens.cells.facts(int(lens.cells.document_of(np.array([position]))[0]))
        known = {name: facts[name] for name in ("doc_id", "title", "source", "license")}
        return known | {"position": position}

    return [
        Quote(text, span, tuple(map(place, span.positions)))
        for text, span in list(distinct.items())[:limit]
    ]


def verbatim_spans(
    ids: Sequence[int], suffixes: Suffixes, start: int = 0, *, minimum: int = MINIMUM
) -> list[VerbatimSpan]:
    """Return the longest spans of a text that occur in the corpus: by length, rarity and start.

    A span is reported if it occurs there, has ``minimum`` tokens or more, begins at ``start`` or
    later, and lies in no other that occurs there. Spans may overlap.
    """
    tokens = np.asarray(ids, dtype=np.int64)

    @cache
    def surprise(token: int) -> float:
        return -math.log2(suffixes.count([token]) / len(suffixes))

    spans: list[VerbatimSpan] = []
    reached = start
    for first in range(start, len(tokens)):
        length, count = suffixes.longest_prefix(tokens[first:])
        # Ends never go back, so only what reaches beyond the spans before lies in none of them.
        if first + length <= reached:
            continue
        reached = first + length
        if length >= minimum:
            span = tokens[first:reached]
            rarity = math.fsum(map(surprise, span.tolist()))
            places = tuple(suffixes.find(span, PLACES).tolist())
            spans.append(VerbatimSpan(first, length, count, rarity, places))
    return sorted(spans, key=lambda span: (-span.length, -span.rarity, span.start))
