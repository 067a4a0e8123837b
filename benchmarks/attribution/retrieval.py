"""What attribution has to beat: finding documents by their words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """Okapi BM25 over words (Robertson and Zaragoza 2009), as Lucene weighs rare words.

    score(d, q) = Σ_w idf_w · f (k₁ + 1) / (f + k₁ (1 − b + b · |d| / mean |d|)),
    idf_w = ln(1 + (N − n_w + ½) / (n_w + ½)), f the times that w occurs in d, n_w the documents
    with w in them; a word counts as often as it stands in the query.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.k1 = k1
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], dtype=np.float64)
        self._norm = k1 * (1 - b + b * lengths / lengths.mean())
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for document, count in enumerate(counts):
            for word, times in count.items():
                self._postings.setdefault(word, []).append((document, times))

    def scores(self, query: str) -> np.ndarray:
        """Return the score of every document, float64 [documents]."""
        scores = np.zeros(len(self._norm))
        for word in words(query):
            if word in self._postings:
                documents, times = np.array(self._postings[word]).T
                count = len(documents)
                idf = np.log1p((len(scores) - count + 0.5) / (count + 0.5))
                scores[documents] += idf * times * (self.k1 + 1) / (times + self._norm[documents])
        return scores

    def best(self, query: str, count: int) -> list[int]:
        """Return the documents with the largest scores."""
        return np.argsort(-self.scores(query), kind="stable")[:count].tolist()
