"""From prototypes to training text: which sources and documents carry a prediction.

    share(s) = Σ_i e⁺_i · weight(s | i) / Σ (e⁺_i + e⁺_residual + e⁺_bias),  e⁺ = max(e, 0)

over the prototypes i of every position asked about. Roll-ups by source, domain and licence use
each prototype's activation over the whole corpus; documents use its kept contexts, weighted by how
similar their hidden state is to the one being explained. Unattributed is the share of residual,
bias and prototypes that the corpus never uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prismlm.lens.directory import Lens

# The softmax temperature of cosines between hidden states: 0.05 of cosine is a factor of e.
CONTEXT_TEMPERATURE = 0.05


@dataclass(frozen=True)
class EvidenceTable:
    """The evidence of T positions, k prototypes each.

    Attributes:
        indices: prototypes, int64 [T, k].
        evidence: their evidence for the target, float32 [T, k]; zero where not used.
        residual: evidence of the residual, float32 [T].
        bias: evidence of the bias, float32 [T].
        states: unit hidden states, float32 [T, d].
    """

    indices: Tensor
    evidence: Tensor
    residual: Tensor
    bias: Tensor
    states: Tensor

    def __getitem__(self, positions: slice) -> EvidenceTable:
        """Return some of the positions."""
        return EvidenceTable(
            self.indices[positions],
            self.evidence[positions],
            self.residual[positions],
            self.bias[positions],
            self.states[positions],
        )

    @property
    def positive(self) -> Tensor:
        """Positive evidence of prototypes, [T, k]; negative evidence is never netted."""
        return self.evidence.clamp_min(0)

    @property
    def elsewhere(self) -> float:
        """Positive evidence of residuals and biases, which no training text stands behind."""
        return float(
            self.residual.double().clamp_min(0).sum() + self.bias.double().clamp_min(0).sum()
        )

    @property
    def total(self) -> float:
        """All positive evidence, of prototypes, residuals and biases."""
        return float(self.positive.double().sum()) + self.elsewhere

    def per_prototype(self, count: int) -> np.ndarray:
        """Return the positive evidence of each prototype over all positions, float64 [K]."""
        return np.bincount(
            self.indices.flatten().numpy(),
            self.positive.double().flatten().numpy(),
            minlength=count,
        )


@dataclass(frozen=True)
class Share:
    """One source and its share of the positive evidence."""

    key: str
    share: float


@dataclass(frozen=True)
class Sources:
    """Shares by one column, largest first; items and ``unattributed`` sum to 1."""

    by: str
    items: tuple[Share, ...]
    unattributed: float

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"by", "items": [{"key", "share"}…], "unattributed"}``."""
        items = [{"key": item.key, "share": item.share} for item in self.items]
        return {"by": self.by, "items": items, "unattributed": self.unattributed}


@dataclass(frozen=True)
class DocumentShare:
    """A document, its share, and the place in it that most resembles what is explained."""

    doc_id: str
    share: float
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    before: str | None
    token: str | None
    after: str | None
    position: int

    @property
    def text(self) -> str | None:
        """The text around the place, or None if the index was built without text."""
        return None if self.token is None else f"{self.before}{self.token}{self.after}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        return {
            "doc_id": self.doc_id,
            "share": self.share,
            "source": self.source,
            "license": self.license,
            "text": self.text,
            "position": self.position,
        }


def source_shares(table: EvidenceTable, lens: Lens, by: str = "source") -> Sources:
    """Return the shares of the positions by source, domain, license or document.

    Raises:
        InputError: ``by`` is none of those.
    """
    per_prototype = table.per_prototype(lens.num_prototypes)
    if by == "document":
        names, document_of_row = lens.documents
        rows, weights = context_weights(table, lens)
        sums = np.bincount(document_of_row[rows], weights, minlength=len(names))
        placed = np.diff(lens.first_rows) > 0
    else:
        names, spread = lens.group_weights(by)
        sums = per_prototype @ spread
        placed = spread.any(1)
    if table.total <= 0:
        return Sources(by, (), 1.0)
    shares = sums / table.total
    order = np.argsort(-shares, kind="stable")
    items = tuple(Share(names[i], float(shares[i])) for i in order.tolist() if shares[i] > 0)
    unplaced = float(per_prototype[~placed].sum())
    return Sources(by, items, (table.elsewhere + unplaced) / table.total)


def context_weights(table: EvidenceTable, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """Spread the positive evidence over kept contexts.

    Within a prototype, a context weighs softmax(cos(state, context state) / 0.05), so that the
    text nearest to the state being explained counts most.

    Returns:
        rows of the index, int64 [n], and the evidence each carries, float64 [n].
    """
    position, slot = (table.positive > 0).nonzero(as_tuple=True)
    prototype = table.indices[position, slot].numpy()
    evidence = table.positive[position, slot].double().numpy()
    rows: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for t, i, e in zip(position.tolist(), prototype.tolist(), evidence.tolist(), strict=True):
        part = lens.rows_of(i)
        if part.start == part.stop:
            continue
        cosines = lens.states[part].float() @ table.states[t]
        share = torch.softmax(cosines.double() / CONTEXT_TEMPERATURE, 0)
        rows.append(np.arange(part.start, part.stop))
        weights.append(e * share.numpy())
    if not rows:
        return np.empty(0, dtype=np.int64), np.empty(0)
    return np.concatenate(rows), np.concatenate(weights)


def document_shares(table: EvidenceTable, lens: Lens, limit: int = 10) -> list[DocumentShare]:
    """Return the documents with the largest shares, each with its weightiest place."""
    rows, weights = context_weights(table, lens)
    if not len(rows):
        return []
    by_row = np.bincount(rows, weights, minlength=lens.index.num_rows)
    names, document_of_row = lens.documents
    by_document = np.bincount(document_of_row, by_row, minlength=len(names))
    best = np.argsort(-by_document, kind="stable")[:limit]
    documents: list[DocumentShare] = []
    for number in best[by_document[best] > 0].tolist():
        places = np.flatnonzero(document_of_row == number)
        row = int(places[np.argmax(by_row[places])])
        entry = lens.index.slice(row, 1).to_pylist()[0]
        for column in ("prototype", "rank", "cosine", "activation", "routed"):
            del entry[column]
        documents.append(DocumentShare(share=float(by_document[number] / table.total), **entry))
    return documents
