"""Do scores point to text of the right domain? Asked of documents held out of training.

    own share = mean over documents of Σ_{p of its own domain} s⁺_p / Σ_p s⁺_p

with s⁺ the positive part of the scores of a document's predictions, joined. *Accuracy* is the
share of documents whose own domain has the largest lift, its share over its mean share in all
documents asked: so a domain that every question points to wins none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prismlm.statistics import bootstrap


@dataclass(frozen=True)
class DomainShare:
    """How well evidence finds a document's own domain.

    ``own_share`` is the mean share on the own domain, ``chance`` the same if evidence followed each
    domain's share of all; ``accuracy`` the share of documents whose own domain has the largest
    lift. ``own_shares`` and ``hits`` are those of each document, by its row.
    """

    documents: int
    own_share: float
    chance: float
    accuracy: float
    own_shares: dict[int, float] = field(repr=False)
    hits: dict[int, bool] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name, without those of single documents."""
        values = asdict(self)
        return {key: values[key] for key in values if key not in ("own_shares", "hits")}


def passage_domain_share(
    scores: np.ndarray, domains: Sequence[str], own: Sequence[str]
) -> DomainShare:
    """Compare where the scores of each held-out document point with the domain it is from.

    ``scores`` of passages are [documents, P], negative ones are left out; ``domains`` are those of
    the passages, ``own`` those of the documents.
    """
    names = sorted(set(domains))
    column = {name: i for i, name in enumerate(names)}
    place = np.array([column[name] for name in domains])
    positive = np.clip(scores, 0, None).astype(np.float64)
    sums = np.stack([positive[:, place == i].sum(1) for i in range(len(names))], 1)
    total = sums.sum(1)
    rows = [row for row, name in enumerate(own) if name in column and total[row] > 0]
    shares = sums[rows] / total[rows, None]
    right = np.array([column[own[row]] for row in rows])
    base = shares.mean(0)
    lift = np.divide(shares, base, out=np.zeros_like(shares), where=base > 0)
    own_shares, hits = shares[np.arange(len(rows)), right], lift.argmax(1) == right
    return DomainShare(
        documents=len(rows),
        own_share=float(own_shares.mean()),
        chance=float(base[right].mean()),
        accuracy=float(hits.mean()),
        own_shares=dict(zip(rows, own_shares.tolist(), strict=True)),
        hits=dict(zip(rows, hits.tolist(), strict=True)),
    )


def paired_difference(left: Mapping[int, float], right: Mapping[int, float]) -> dict[str, float]:
    """Return mean(left − right) over the documents of both, with its 95 % bootstrap interval."""
    common = sorted(left.keys() & right.keys())
    interval = bootstrap(np.array([float(left[row]) - float(right[row]) for row in common]))
    return {"difference": interval.value, "low": interval.low, "high": interval.high}
