"""Does the evidence point to text of the right domain? Measured on documents held out of training.

For a held-out document of domain D, the share of D is Σ_i e⁺_i · weight(D | i) / Σ_i e⁺_i over the
prototypes of all its predictions, targets being the words that stand there. Beside it stand two
yardsticks: chance, D's share of all activation, and the same head with the rows of its prototype →
domain map shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.explain.prediction import OutputLayer
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.statistics import bootstrap

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.index.lens import Lens


class DocumentEvidence(NamedTuple):
    """Positive evidence of each prototype for the words of each document, [documents, K]."""

    documents: np.ndarray
    per_prototype: np.ndarray


class GroupWeights(NamedTuple):
    """How each prototype's activation over the whole corpus spreads over the keys of one column.

    Attributes:
        keys: the distinct values, in order of first appearance; nulls are "(unknown)".
        weights: rows sum to 1, or are all zero for a prototype that is never used, [K, keys].
    """

    keys: list[str]
    weights: np.ndarray

    @classmethod
    def of(cls, lens: Lens, by: str) -> GroupWeights:
        """Return those of a lens, by source, domain or license."""
        names, codes = lens.keys("mass", by)
        weights = np.zeros((lens.num_prototypes, len(names)))
        at = lens.mass["prototype"].to_numpy(), codes
        np.add.at(weights, at, lens.mass["activation_sum"].to_numpy())
        total = weights.sum(1, keepdims=True)
        return cls(names, np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))


@dataclass(frozen=True)
class DomainShare:
    """How well evidence finds a document's own domain.

    Attributes:
        documents: held-out documents measured.
        own_share: mean over documents of the share that falls on their own domain.
        chance: the same if evidence followed each domain's share of all activation.
        accuracy: share of documents whose own domain has the largest share relative to chance.
        chance_accuracy: one over the number of domains.
        own_shares: the own share of each document, by its row.
        hits: whether each document counts for the accuracy, by its row.
    """

    documents: int
    own_share: float
    chance: float
    accuracy: float
    chance_accuracy: float
    own_shares: dict[int, float] = field(repr=False)
    hits: dict[int, bool] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name, without those of single documents."""
        values = asdict(self)
        return {key: values[key] for key in values if key not in ("own_shares", "hits")}


@torch.no_grad()
def document_evidence(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    corpus: Corpus,
    documents: np.ndarray,
    *,
    window: int,
    stride: int,
    tokens_per_batch: int = 4096,
) -> DocumentEvidence:
    """Sum each prototype's positive evidence for the next words of every document."""
    from prismlm.corpus.windows import document_windows, window_batches

    output = OutputLayer.of(model, logit_map)
    row_of = torch.full((len(corpus),), -1, dtype=torch.int64)
    row_of[torch.from_numpy(documents)] = torch.arange(len(documents))
    sums = torch.zeros(len(documents) * head.num_prototypes, dtype=torch.float64)
    grid = document_windows(documents, corpus.starts, corpus.lengths, window, stride)
    model.eval()
    device = output.weight.device
    for batch in window_batches(grid, corpus, tokens_per_batch, corpus.eos_token_id):
        ids, attended = batch.input_ids.to(device), batch.attention_mask.to(device)
        scored = batch.owned.to(device)[:, :-1] & attended[:, 1:]
        with capture(model, logits=False) as seen:
            model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
        z = seen.z[:, :-1][scored].float()
        routing = head(z).routing
        parts = output.parts(head, z, routing, ids[:, 1:][scored])
        row = row_of[batch.document][:, None].expand_as(scored)[scored.cpu()]
        cell = row[:, None] * head.num_prototypes + routing.indices.cpu()
        evidence = parts.evidence.clamp_min(0).double().cpu()
        sums.index_add_(0, cell.flatten(), evidence.flatten())
    return DocumentEvidence(documents, sums.view(len(documents), -1).numpy())


def shuffled(weights: GroupWeights, seed: int) -> GroupWeights:
    """Return the control: every prototype is given another one's domains."""
    order = np.random.default_rng(seed).permutation(len(weights.weights))
    return GroupWeights(weights.keys, weights.weights[order])


def domain_share(
    evidence: DocumentEvidence, weights: GroupWeights, domains: list[str]
) -> DomainShare:
    """Compare where the evidence of each document points with the domain it is from.

    Args:
        evidence: of n documents.
        weights: how each prototype's activation spreads over domains.
        domains: the domain of each of the n documents.

    Raises:
        InputError: no document has both evidence and a domain that the index knows.
    """
    column = {key: i for i, key in enumerate(weights.keys)}
    placed = evidence.per_prototype * weights.weights.any(1)
    total = placed.sum(1)
    rows = [r for r, domain in enumerate(domains) if domain in column and total[r] > 0]
    if not rows:
        raise InputError(
            "no held-out document has a domain that occurs in the index: give the corpus a domain "
            "column, and hold out more documents."
        )
    shares = placed[rows] @ weights.weights / total[rows, None]
    own = np.array([column[domains[r]] for r in rows])
    everything = placed.sum(0) @ weights.weights
    base = everything / everything.sum()
    lift = np.divide(shares, base, out=np.zeros_like(shares), where=base > 0)
    own_shares = shares[np.arange(len(rows)), own]
    hits = lift.argmax(1) == own
    return DomainShare(
        documents=len(rows),
        own_share=float(own_shares.mean()),
        chance=float(base[own].mean()),
        accuracy=float(hits.mean()),
        chance_accuracy=1 / len(weights.keys),
        own_shares=dict(zip(rows, own_shares.tolist(), strict=True)),
        hits=dict(zip(rows, hits.tolist(), strict=True)),
    )


def paired_difference(left: Mapping[int, float], right: Mapping[int, float]) -> dict[str, float]:
    """Return mean(left − right) over the documents of both, with its 95 % bootstrap interval.

    Raises:
        InputError: the two share no document.
    """
    common = sorted(left.keys() & right.keys())
    if not common:
        raise InputError("the two results share no document, so they cannot be compared.")
    found = bootstrap(np.array([float(left[row]) - float(right[row]) for row in common]))
    return {"difference": found.value, "low": found.low, "high": found.high}
