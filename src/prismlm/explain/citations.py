"""Which sentences of an answer a document of the corpus carries nearly all of.

Support (:mod:`prismlm.explain.support`) asks how much of what a whole answer tells one document
carries. Asked of a single sentence, each document with s ≥ 0.8, which would be strong support, is
cited there. Sentences of common words alone cite nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from prismlm.explain.passages import PositionAttribution
from prismlm.explain.support import LEAST_TOLD, STRONG, carried_shares
from prismlm.explain.trace import Trace
from prismlm.index.around import sentences


@dataclass(frozen=True)
class Citation:
    """A sentence of an answer, and a document that carries nearly all that it tells.

    Attributes:
        start, end: of the sentence, in characters of ``trace.answer``.
        share: s, the part of what the sentence tells that the document carries.
        document: its doc_id, source, domain, license, title and url.
    """

    start: int
    end: int
    share: float
    document: dict[str, Any]


def citations(trace: Trace) -> list[Citation]:
    """Return the documents to cite in an answer, sentence by sentence, the best first in each.

    None in a lens without cells, and where states are zero.
    """
    if trace.support is None or trace.lm is None:
        return []
    found = trace.attribution("evidence")
    assert isinstance(found, PositionAttribution)
    ids, words, text = trace.answer_ids, trace.lm.words, trace.answer
    # The first token of a text that was only read is predicted by none.
    before = 0 if trace.first or trace.written else 1
    cited: list[Citation] = []
    for start, end in sentences(text):
        # The tokens up to a character are the fewest that spell it.
        first, last = (
            bisect_left(range(len(ids)), place, key=lambda count: len(words(ids[:count])))
            for place in (start + 1, end)
        )
        cited += _of_sentence(found, max(0, first - 1 - before), last - before, (start, end))
    return cited


def _of_sentence(
    found: PositionAttribution, first: int, last: int, span: tuple[int, int]
) -> list[Citation]:
    """Return the citations of the predictions from ``first`` up to ``last``."""
    number = found.carried[:, 0]
    inside = (number >= first) & (number < last)
    mine = found.carried[inside] - np.array([first, 0])
    if last <= first:
        return []
    tokens, telling = found.tokens[first:last], found.telling[first:last]
    documents, shares, told = carried_shares(tokens, telling, mine)
    if told < LEAST_TOLD:
        return []
    order = np.argsort(-shares, kind="stable")
    return [
        Citation(*span, float(shares[i]), found.cells.facts(int(documents[i])))
        for i in order[shares[order] >= STRONG]
    ]
