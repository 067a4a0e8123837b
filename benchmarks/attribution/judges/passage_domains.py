"""Do scores point to text of the right domain? Asked of documents held out of training.

    own share = mean over documents of Σ_{p of its own domain} s⁺_p / Σ_p s⁺_p

with s⁺ the positive part of the scores of a document's predictions, joined. *Accuracy* is the
share of documents whose own domain has the largest lift, its share over its mean share in all
documents asked: so a domain that every question points to wins none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.attribution.judges.domain_share import DomainShare
from prismlm.errors import InputError


def passage_domain_share(
    scores: np.ndarray, domains: Sequence[str], own: Sequence[str]
) -> DomainShare:
    """Compare where the scores of each held-out document point with the domain it is from.

    Chance is a document's own domain at its mean share over all documents.

    Args:
        scores: of passages, [documents, P]; negative ones are left out.
        domains: of each passage.
        own: of each held-out document.

    Raises:
        InputError: lists of other lengths, or no document with a score and a known domain.
    """
    if len(own) != len(scores) or len(domains) != scores.shape[1]:
        raise InputError(
            f"scores {list(scores.shape)} with {len(own)} documents and {len(domains)} passages: "
            "expected a domain for each row and for each column."
        )
    names = sorted(set(domains))
    column = {name: i for i, name in enumerate(names)}
    place = np.array([column[name] for name in domains])
    positive = np.clip(scores, 0, None).astype(np.float64)
    sums = np.stack([positive[:, place == i].sum(1) for i in range(len(names))], 1)
    total = sums.sum(1)
    rows = [row for row, name in enumerate(own) if name in column and total[row] > 0]
    if not rows:
        raise InputError(
            "no held-out document has both a score and a domain that a passage has: give the "
            "corpus a domain column, and hold out more documents."
        )
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
        chance_accuracy=1 / len(names),
        own_shares=dict(zip(rows, own_shares.tolist(), strict=True)),
        hits=dict(zip(rows, hits.tolist(), strict=True)),
    )
