"""Short prompts of a known domain: which domains does ``prismlm explain`` point to?

A prompt is the first N tokens of a held-out document, read exactly as ``explain`` reads it: its
targets are the words that stand there, and after the last one the model's top token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution.judges.domain_share import (
    DocumentEvidence,
    DomainShare,
    GroupWeights,
    domain_share,
    paired_difference,
    shuffled,
)
from prismlm.errors import InputError
from prismlm.explain.prediction import split_predictions
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import weight_of

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus


def prompt_evidence(
    model: PreTrainedModel,
    head: PrototypeHead,
    logit_map: LogitMap,
    corpus: Corpus,
    documents: np.ndarray,
    tokens: int,
) -> DocumentEvidence:
    """Sum each prototype's positive evidence over the first ``tokens`` tokens of every document.

    A shorter document is read whole; its end of text is never part of a prompt.

    Raises:
        InputError: ``tokens`` is below 1.
        DecompositionError: parts that do not sum to the model's logit.
    """
    if tokens < 1:
        raise InputError(f"prompts of {tokens} tokens: expected at least 1.")
    sums = np.zeros((len(documents), head.num_prototypes))
    device = weight_of(model).device
    for row, document in enumerate(documents.tolist()):
        length = min(tokens, int(corpus.lengths[document]) - 1)
        if length < 1:
            continue
        found = corpus.tokens(int(corpus.starts[document]), length)
        ids = torch.from_numpy(found.astype(np.int64))
        split = split_predictions(model, head, logit_map, ids[None].to(device), length)
        table = split.evidence()
        np.add.at(sums[row], table.indices.numpy(), table.positive.numpy())
    return DocumentEvidence(documents, sums)


def against_controls(
    trained: tuple[DocumentEvidence, GroupWeights],
    states: tuple[DocumentEvidence, GroupWeights],
    domains: list[str],
    shuffles: int,
) -> dict[str, Any]:
    """Return the domain shares of a head beside both controls.

    Args:
        trained: evidence and prototype → domain map of the trained head.
        states: of the head whose prototypes are random hidden states.
        domains: of each document.
        shuffles: how many shuffled maps are averaged; pairs are compared with the first.
    """
    evidence, weights = trained
    head = domain_share(evidence, weights, domains)
    control = domain_share(*states, domains)
    maps = [domain_share(evidence, shuffled(weights, seed), domains) for seed in range(shuffles)]
    return {
        "trained": head.to_dict(),
        "random_states": control.to_dict(),
        "shuffled_map": {
            key: float(np.mean([shuffle.to_dict()[key] for shuffle in maps]))
            for key in head.to_dict()
        },
        "shuffles": shuffles,
        "trained_minus_random_states": _differences(head, control),
        "trained_minus_shuffled_map": _differences(head, maps[0]),
    }


def _differences(left: DomainShare, right: DomainShare) -> dict[str, Any]:
    return {
        "own_share": paired_difference(left.own_shares, right.own_shares),
        "accuracy": paired_difference(left.hits, right.hits),
    }
