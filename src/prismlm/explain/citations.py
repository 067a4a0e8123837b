"""Which sentences of an answer a document of the corpus carries nearly all of.

Support (:mod:`prismlm.explain.support`) asks how much of what a whole answer tells one document
carries. Asked of a single sentence, each document with s ≥ 0.8, which would be strong support, is
cited there. Sentences of common words alone cite nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from prismlm.explain.support import LEAST_TOLD, STRONG, carried_shares
from prismlm.explain.trace import Trace
from prismlm.lens.text import sentences


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

    None where support is not known.
    """
    return [] if trace.support is None or trace.lm is None else list(_citations(trace))


def _citations(trace: Trace) -> Iterator[Citation]:
    assert trace.lm is not None
    found, ids, words = trace.attribution(), trace.answer_ids, trace.lm.words
    # The first token of a text that was only read is predicted by none.
    unpredicted = 0 if trace.first or trace.written else 1
    for start, end in sentences(trace.answer):
        # The tokens up to a character are the fewest that spell it.
        first, last = (
            bisect_left(range(len(ids)), place, key=lambda count: len(words(ids[:count])))
            for place in (start + 1, end)
        )
        first, last = max(0, first - 1 - unpredicted), last - unpredicted
        if last <= first:
            continue
        prediction = found.carried[:, 0]
        inside = (prediction >= first) & (prediction < last)
        carried = found.carried[inside] - np.array([first, 0])
        figures = found.tokens[first:last], found.telling[first:last], carried
        documents, shares, told = carried_shares(*figures)
        for i in np.argsort(-shares, kind="stable") if told >= LEAST_TOLD else ():
            if shares[i] >= STRONG:
                facts = found.lens.cells.facts(int(documents[i]))
                yield Citation(start, end, float(shares[i]), facts)
