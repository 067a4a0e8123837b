"""Do the documents with the highest scores hold the fact that was asked for?

recall@n = |n best documents ∩ documents with the fact| / min(n, documents with the fact)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.passages import best


def document_recall(
    scores: np.ndarray, planted: Sequence[np.ndarray], limit: int = 10
) -> np.ndarray:
    """Return the recall of every question, float64 [Q], from scores of documents [Q, D].

    A document without a score above 0 is not named, even where fewer than ``limit`` have one.
    """
    found = best(scores, limit)
    hits = [
        len({row for row in named.tolist() if scores[number, row] > 0} & set(rows.tolist()))
        for number, (named, rows) in enumerate(zip(found, planted, strict=True))
    ]
    return np.array([hit / min(limit, len(r)) for hit, r in zip(hits, planted, strict=True)])
