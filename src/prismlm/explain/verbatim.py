"""What of a text stands in the corpus word for word: its longest spans, and where.

After OLMoTrace (Liu et al. 2025): from every token on, the longest run of tokens that stands in
some document; runs within a longer one are dropped, long and rare ones come first. It says where a
text stands, not whether the model took it from there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from prismlm.errors import InputError, check_whole
from prismlm.index.lens import Lens
from prismlm.index.suffixes import Suffixes

MINIMUM = 5
LIMIT = 10
PLACES = 5


@dataclass(frozen=True)
class VerbatimSpan:
    """A span of a text that stands in the corpus token for token, and in no longer one that does.

    Attributes:
        start: its first token, counted from 0 in the text.
        length: its tokens.
        count: how often it stands in the documents of the lens.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"positions": list(self.positions)}


@dataclass(frozen=True)
class Quote:
    """A verbatim span in words, with the documents that it stands in.

    Attributes:
        text: the span.
        span: where it lies in the text that was asked about, and how often it stands in the corpus.
        places: doc_id, title, source, license and position of the first places.
    """

    text: str
    span: VerbatimSpan
    places: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        span = self.span.to_dict()
        del span["positions"]
        return {"text": self.text, **span, "places": list(self.places)}


def quotes(
    ids: Sequence[int], tokens: Sequence[str], start: int, lens: Lens, limit: int
) -> list[Quote]:
    """Return the verbatim spans of a text from a token on, in words; see :func:`verbatim_spans`.

    Of what a text says twice, the first is given.

    Args:
        ids, tokens: the text, by number and in words.
        start: the first token that is looked for.
        lens: with a suffix array.
        limit: the most spans.
    """
    assert lens.suffixes is not None
    found: dict[str, VerbatimSpan] = {}
    for span in verbatim_spans(ids, lens.suffixes, start, limit=None):
        found.setdefault("".join(tokens[span.start : span.end]), span)
    return [
        Quote(text, span, tuple(_place(lens, position) for position in span.positions))
        for text, span in list(found.items())[:limit]
    ]


def _place(lens: Lens, position: int) -> dict[str, Any]:
    """Return the document of a place; without cells or corpus, the position alone."""
    known = ("doc_id", "title", "source", "license")
    row: dict[str, Any] = dict.fromkeys(known)
    if lens.cells is not None:
        number = int(lens.cells.document_of(np.array([position]))[0])
        found = lens.cells.facts(number)
        row = {name: found[name] for name in known}
    elif lens.corpus is not None:
        number = lens.corpus.document_at(position)
        row = {name: lens.corpus.column(name)[number] for name in known}
    return row | {"position": position}


def verbatim_spans(
    ids: Sequence[int],
    suffixes: Suffixes,
    start: int = 0,
    *,
    minimum: int = MINIMUM,
    limit: int | None = LIMIT,
    places: int = PLACES,
    words: Sequence[int] | None = None,
) -> list[VerbatimSpan]:
    """Return the longest spans of a text that stand in the corpus, long ones first.

    A span is reported if it stands there, has ``minimum`` tokens or more, and lies in no other
    that stands there. Spans may overlap. They are ordered by length, then by rarity, then by where
    they start.

    Args:
        ids: the tokens of the text, the prompt's first.
        suffixes: of the lens.
        start: the first token to be searched: that of the answer, where the prompt is known.
        minimum: tokens of the shortest span.
        limit: the most spans; None for all.
        places: the most positions of each.
        words: how many tokens each word of the text has, as :attr:`WordedText.counts`. Spans then
            begin and end between words; only at ``start`` may one begin within. Without, any token
            is a word.

    Raises:
        InputError: ``start`` lies outside of the text, ``minimum`` is below 1, a limit is negative,
            or the words do not add up to the text.
        FormatError: the files of the lens are damaged.
    """
    check_whole("start", start, 0, len(ids))
    check_whole("the length of a span", minimum, 1)
    for name, number in (("spans", limit), ("places", places)):
        check_whole(f"the number of {name}", 0 if number is None else number)
    if words is not None and (sum(words) != len(ids) or min(words, default=0) < 0):
        raise InputError(f"the words have {sum(words)} tokens and the text has {len(ids)}.")
    tokens = np.asarray(ids, dtype=np.int64)

    @cache
    def surprise(token: int) -> float:
        return -math.log2(suffixes.count([token]) / len(suffixes))

    spans: list[VerbatimSpan] = []
    # Where spans may begin and end, ascending.
    ends = range(1, len(ids) + 1) if words is None else accumulate(words)
    bounds = [start, *sorted({end for end in ends if end > start})]
    for first, end, count in _longest(tokens, suffixes, bounds):
        if end - first >= minimum:
            rarity = math.fsum(surprise(token) for token in tokens[first:end].tolist())
            spans.append(VerbatimSpan(first, end - first, count, rarity, ()))
    spans.sort(key=lambda span: (-span.length, -span.rarity, span.start))
    return [
        replace(
            span, positions=tuple(suffixes.find(tokens[span.start : span.end], places).tolist())
        )
        for span in spans[:limit]
    ]


def _longest(
    tokens: np.ndarray, suffixes: Suffixes, bounds: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and count of the spans between bounds that no other one holds."""
    reached = bounds[0]
    for first in bounds[:-1]:
        length, count = suffixes.longest_prefix(tokens[first:])
        end = bounds[bisect_right(bounds, first + length) - 1]
        # Ends never go back, so only what reaches beyond the spans before lies in none of them.
        if end > reached:
            reached = end
            whole = end == first + length
            yield first, end, count if whole else suffixes.count(tokens[first:end])
