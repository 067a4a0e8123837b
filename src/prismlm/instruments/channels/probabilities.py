"""The probability that a model gives one token after each of several contexts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.channels.case_files import Probe
from prismlm.models.seam import base_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_BATCH = 4096
# Rows of logits formed at once.
LOGIT_ROWS = 64


@torch.no_grad()
def target_probabilities(
    model: PreTrainedModel, probes: Sequence[Probe], tokens_per_batch: int = TOKENS_PER_BATCH
) -> Float64[Tensor, " n"]:
    """Return p(target | context) of each probe, with what interventions hold; on the CPU.

    Contexts of like length are read together, ``tokens_per_batch`` positions at a time with
    padding or one context where it is longer; logits are formed at the last positions only.

    Raises:
        InputError: the model is in training mode, in which dropout would move probabilities.
    """
    if model.training:
        raise InputError("the model is in training mode: call model.eval() before measuring it.")
    found = torch.empty(len(probes), dtype=torch.float64)
    for members in _batches(probes, tokens_per_batch):
        chosen = [probes[i] for i in members]
        lengths = torch.tensor([len(probe.ids) for probe in chosen])
        width = int(lengths.max())
        ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, probe in enumerate(chosen):
            ids[row, : len(probe.ids)] = torch.tensor(probe.ids)
        mask = torch.arange(width) < lengths[:, None]
        hidden = base_model_of(model)(
            input_ids=ids.to(model.device),
            attention_mask=mask.long().to(model.device),
            use_cache=False,
        ).last_hidden_state[torch.arange(len(chosen)), (lengths - 1).to(model.device)]
        targets = torch.tensor([probe.target_id for probe in chosen], device=model.device)
        found[members] = probabilities_at(model, hidden, targets).cpu()
    return found


def probabilities_at(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor
) -> Float64[Tensor, " n"]:
    """Return the probability of ``targets`` [n] after last hidden states [n, d]."""
    head: Any = model.get_output_embeddings()
    parts = [
        head(rows).double().log_softmax(-1).gather(1, wanted[:, None])[:, 0].exp()
        for rows, wanted in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(parts)


def _batches(probes: Sequence[Probe], tokens: int) -> Iterator[list[int]]:
    order = sorted(range(len(probes)), key=lambda i: len(probes[i].ids))
    members: list[int] = []
    for i in order:
        if members and (len(members) + 1) * len(probes[i].ids) > tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members
