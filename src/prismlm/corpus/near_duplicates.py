"""Near-duplicate documents, counted while a corpus is built: MinHash over runs of tokens.

A document is the set of its runs of eight tokens, and two are as near as the share s of all their
runs that both have (Jaccard). Each run has a hash; the hashes of a document fall into 96 bins, and
the least of each bin is the same in two documents with probability s (one permutation hashing, Li,
Owen and Zhang 2012). Twelve bins make a key, and a document that shares one of its eight keys with
an earlier one is counted, which has the probability

    1 − (1 − s¹²)⁸        0.002 at s = 0.5, 0.1 at 0.7, 0.5 at 0.82, 0.9 at 0.89, 1 at 1

Time is linear in tokens, memory 64 bytes a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

RUN = 8
BINS = 96
KEYS = 8
# What half of all pairs of that likeness are counted from.
LIKENESS = 0.82
_EMPTY = np.uint64(2**64 - 1)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_OTHER = np.uint64(0xBF58476D1CE4E5B9)


class NearDuplicates:
    """Counts the documents that are nearly the same as an earlier one.

    Attributes:
        count: how many there were so far.
    """

    def __init__(self) -> None:
        self.count = 0
        # Sorted arrays, each more than twice as long as the next: few to look into, cheap to join.
        self._seen: list[np.ndarray] = []

    def add(self, documents: Sequence[Sequence[int]]) -> None:
        """Take the tokens of some documents, in order; a document without tokens is none's like."""
        documents = [ids for ids in documents if len(ids)]
        if not documents:
            return
        keys = keys_of(documents)
        known = np.zeros(keys.shape, dtype=bool)
        for part in self._seen:
            place = np.searchsorted(part, keys)
            known |= part[np.minimum(place, len(part) - 1)] == keys
        distinct, first, which = np.unique(keys, return_index=True, return_inverse=True)
        row = np.arange(len(keys))[:, None]
        known |= first[which.reshape(keys.shape)] // KEYS < row
        self.count += int(known.any(axis=1).sum())
        self._seen.append(distinct)
        while len(self._seen) > 1 and len(self._seen[-2]) <= 2 * len(self._seen[-1]):
            last = self._seen.pop()
            self._seen[-1] = np.union1d(self._seen[-1], last)


def keys_of(documents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the keys of documents of at least one token, uint64 [documents, 8]."""
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    tokens = np.fromiter(chain.from_iterable(documents), dtype=np.uint64, count=int(lengths.sum()))
    own = np.repeat(np.arange(len(documents)), lengths)
    # Between documents stand places of no token, so that no run holds tokens of two.
    spread = np.zeros(len(tokens) + RUN * len(documents), dtype=np.uint64)
    places = np.arange(len(tokens)) + RUN * own
    spread[places] = _mixed(tokens + np.uint64(1))
    runs = np.zeros_like(spread)
    for _ in range(RUN):
        runs = runs * _FACTOR + spread
        spread = np.roll(spread, -1)
    runs = _mixed(runs[places])
    bins = ((runs >> np.uint64(40)) * np.uint64(BINS) >> np.uint64(24)).astype(np.int64)
    least = np.full((len(documents), BINS), _EMPTY)
    np.minimum.at(least.reshape(-1), own * BINS + bins, runs)
    return _keys(_filled(least))


def _filled(least: np.ndarray) -> np.ndarray:
    """Return minima in which an empty bin has that of the next full one, and how far that is."""
    doubled = np.concatenate([least, least], axis=1)
    width = np.arange(2 * BINS)
    place = np.where(doubled == _EMPTY, 2 * BINS, width)
    following = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1][:, :BINS]
    distance = (following - width[:BINS]).astype(np.uint64)
    return np.take_along_axis(doubled, following, axis=1) + distance * _OTHER


def _keys(minima: np.ndarray) -> np.ndarray:
    grouped = minima.reshape(len(minima), KEYS, -1)
    # The number of a key is in it: the same minima elsewhere are another key.
    keys = np.broadcast_to(np.arange(KEYS, dtype=np.uint64), grouped.shape[:2])
    for column in range(grouped.shape[2]):
        keys = keys * _FACTOR + grouped[:, :, column]
    return _mixed(keys)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * _FACTOR
    values = (values ^ (values >> np.uint64(29))) * _OTHER
    return values ^ (values >> np.uint64(32))
