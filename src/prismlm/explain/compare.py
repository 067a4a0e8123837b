"""Two models of one tokenizer side by side: losses, sources, and which prototypes correspond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from prismlm.corpus.documents import Document
from prismlm.corpus.tokenizer import tokenizer_fingerprint
from prismlm.errors import InputError
from prismlm.explain.attribution import AttributionSum, Sources, support_counts
from prismlm.explain.audit import read_texts, window_of
from prismlm.explain.language_model import PrismLM
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.models.sidecar import weight_of

TILE = 1024


class Matches(NamedTuple):
    """For every prototype of A, its counterpart in B."""

    best: np.ndarray  # the most similar prototype of B, int64 [K_A]
    similarity: np.ndarray  # float64 [K_A]
    mutual: np.ndarray  # whether A's prototype is in turn the most similar to it, bool [K_A]

    def to_dict(self) -> dict[str, float]:
        """Return the median similarity, and the share of mutual matches."""
        return {"median": float(np.median(self.similarity)), "mutual": float(self.mutual.mean())}


def check_comparable(a: PrismLM, b: PrismLM) -> None:
    """Raise InputError unless two models read the same tokens."""
    fingerprints = {tokenizer_fingerprint(lm.tokenizer) for lm in (a, b)}
    if len(fingerprints) > 1 or None in fingerprints:
        raise InputError(
            f"{a.path} and {b.path} have different tokenizers, so neither losses per token nor "
            "signatures can be compared. Compare models of one tokenizer, or two checkpoints."
        )


def compare_texts(a: PrismLM, b: PrismLM, documents: Iterable[Document]) -> dict[str, Any]:
    """Run both models on the same texts, window by window.

    Returns:
        ``texts``, ``predictions``, ``ce``, its difference per text with predictions, mean and
        standard error, ``shares`` if both have a lens, and ``support`` if both have a scale of it.
    """
    check_comparable(a, b)
    models, window = (a, b), window_of([a, b])
    copies = zip(models, tee(documents), strict=True)
    pairs = zip(*(read_texts(lm, copy, window) for lm, copy in copies), strict=True)
    sums = [lm.lens and AttributionSum(lm.lens) for lm in models]
    counts, texts = (Counter[str](), Counter[str]()), 0
    losses, sizes = list[list[float]](), list[int]()
    for pair in pairs:
        texts += 1
        if not len(pair[0].losses):
            continue
        sizes.append(len(pair[0].losses))
        losses.append([float(text.losses.sum(dtype=np.float64)) for text in pair])
        for text, total, count in zip(pair, sums, counts, strict=True):
            if total is not None and text.attribution is not None:
                total.add(text.attribution)
            count.update(text.support.sums if text.support else {})
    if not losses:
        raise InputError("the texts hold nothing to predict: expected at least one of two tokens.")
    totals = np.array(losses)
    ce, differences = totals.sum(0) / sum(sizes), (totals[:, 1] - totals[:, 0]) / sizes
    error = float(stats.sem(differences)) if len(differences) > 1 else None
    attributions = [total.result() for total in sums if total]
    supports = [support_counts(count) for count in counts]
    return {
        "texts": texts,
        "predictions": sum(sizes),
        "ce": {"a": ce[0], "b": ce[1], "difference": ce[1] - ce[0]},
        "ce_difference_per_text": {"mean": float(np.mean(differences)), "standard_error": error},
        "shares": {by: _shares(*(one.sources(by) for one in attributions)) for by in GROUP_COLUMNS}
        if len(attributions) == 2
        else None,
        "support": None if None in supports else dict(zip("ab", supports, strict=True)),
    }


def _shares(a: Sources, b: Sources) -> dict[str, Any]:
    left, right = ({item.key: item.share for item in side.items} for side in (a, b))
    rows = [(key, left.get(key, 0.0), right.get(key, 0.0)) for key in left | right]
    rows.sort(key=lambda row: -(row[1] + row[2]))
    return {
        "items": [{"key": k, "a": x, "b": y, "difference": y - x} for k, x, y in rows],
        "unattributed": {"a": a.unattributed, "b": b.unattributed},
    }


def signature_matches(
    prototypes_a: Tensor, weight_a: Tensor, prototypes_b: Tensor, weight_b: Tensor
) -> Matches:
    """Match prototypes by the cosine of their centred signatures (W − W̄) p over the vocabulary.

    With G = (W_a − W̄_a)ᵀ(W_b − W̄_b), the products of signatures are p_aᵀ G p_b, so that no
    vector over the vocabulary is formed. Widths may differ; the vocabularies must not.
    """
    a, b = (w.double() - w.double().mean(0) for w in (weight_a, weight_b))

    def unit(prototypes: Tensor, gram: Tensor) -> Tensor:
        """Return prototypes scaled so that their signatures have length 1."""
        squared = ((prototypes @ gram) * prototypes).sum(1, keepdim=True)
        return prototypes / squared.clamp_min(1e-300).sqrt()

    left = unit(prototypes_a.double(), a.T @ a) @ (a.T @ b)
    right = unit(prototypes_b.double(), b.T @ b)
    rows: list[tuple[Tensor, Tensor]] = []
    highest = torch.full((len(right),), -torch.inf, dtype=torch.float64)
    best_row = torch.zeros(len(right), dtype=torch.int64)
    for number, tile in enumerate(left.split(TILE)):
        cosines = tile @ right.T
        largest, column = cosines.max(1)
        rows.append((largest, column))
        value, row = cosines.max(0)
        best_row = torch.where(value > highest, row + number * TILE, best_row)
        highest = torch.maximum(highest, value)
    similarity, best = map(torch.cat, zip(*rows, strict=True))
    mutual = best_row[best] == torch.arange(len(best))
    return Matches(best.numpy(), similarity.numpy(), mutual.numpy())


def compare_prototypes(a: PrismLM, b: PrismLM) -> dict[str, Any]:
    """Return how many prototypes of A have a counterpart in B, and how many would by chance.

    Chance is the same search after the rows of B's output embedding, its tokens, are shuffled.

    Returns:
        ``by_signature``, and ``pairs``: one for each prototype of A, the most similar first.
    """
    check_comparable(a, b)
    weight_a, weight_b = weight_of(a.model).cpu(), weight_of(b.model).cpu()
    tokens = min(len(weight_a), len(weight_b))
    weight_a, weight_b = weight_a[:tokens], weight_b[:tokens]
    prototypes_a, prototypes_b = (lm.head.prototypes.detach().cpu() for lm in (a, b))
    signatures = signature_matches(prototypes_a, weight_a, prototypes_b, weight_b)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    chance = signature_matches(prototypes_a, weight_a, prototypes_b, weight_b[order])
    pairs = [
        {
            "a": i,
            "b": (j := int(signatures.best[i])),
            "a_name": None if a.lens is None else a.lens.names[i],
            "b_name": None if b.lens is None else b.lens.names[j],
            "cosine": float(signatures.similarity[i]),
            "mutual": bool(signatures.mutual[i]),
        }
        for i in np.argsort(-signatures.similarity, kind="stable").tolist()
    ]
    return {
        "prototypes": {"a": len(prototypes_a), "b": len(prototypes_b)},
        "by_signature": signatures.to_dict() | {"chance": chance.to_dict()},
        "pairs": pairs,
    }
