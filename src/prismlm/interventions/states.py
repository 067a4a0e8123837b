"""States of texts, read once: their prototypes, and log-probabilities of the tokens after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.lens.opened_model import OpenedModel
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.fast import gather_sum
from prismlm.progress import SILENT, Reporter

# States at once; larger blocks are slower on a CPU.
BATCH_TOKENS, STATES = 2048, 128
Forward = Callable[[Tensor], Tensor]


class Text(NamedTuple):
    """Tokens of a text; those from ``start`` on are predicted."""

    ids: list[int]
    start: int


class Read(NamedTuple):
    """States before N predicted tokens, these tokens, and the number of each one's text."""

    z: Tensor
    targets: Tensor
    text: Tensor


@torch.no_grad()
def read(
    lm: OpenedModel,
    texts: Sequence[Text],
    before: Sequence[int] = (),
    *,
    forward: Forward | None = None,
    progress: Reporter = SILENT,
) -> Read:
    """Run the model over texts, each after the tokens ``before``, in batches of like lengths.

    ``forward`` takes ids [B, T] to states [B, T, d], by default z.
    """

    def last_states(ids: Tensor) -> Tensor:
        with capture(lm.model, logits=False) as captured:
            lm.model(input_ids=ids, use_cache=False)
        return captured.z

    order = sorted(range(len(texts)), key=lambda n: len(texts[n].ids))
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    with progress.task("Reading", len(texts), "texts") as task:
        while order:
            size = max(1, BATCH_TOKENS // (len(texts[order[-1]].ids) + len(before)))
            batch, order = order[-size:], order[:-size]
            rows = [torch.tensor([*before, *texts[n].ids], device=lm.model.device) for n in batch]
            # Padded on the right, which a causal model does not see.
            ids = pad_sequence([row[: max(1, len(row) - 1)] for row in rows], batch_first=True)
            for z, row, n in zip((forward or last_states)(ids), rows, batch, strict=True):
                first = len(before) + texts[n].start
                number = torch.full_like(row[first:], n)
                parts.append((z[first - 1 : len(row) - 1].clone(), row[first:], number))
            task.advance(len(batch))
    return Read(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Routed(NamedTuple):
    """Active prototypes of states and their activations, [T, k]."""

    indices: Tensor
    activations: Tensor

    def moved(self, z: Tensor, prototypes: Tensor, offsets: Tensor) -> Tensor:
        """Return z′ = z + Σ_i (s_i − 1) α_i p_i for offsets s − 1 [K]."""
        change = self.activations * offsets[self.indices]
        blocks = zip(change.split(STATES), self.indices.split(STATES), strict=True)
        return z.float() + torch.cat([gather_sum(i, c, prototypes) for c, i in blocks])

    def along(self, directions: Tensor, prototypes: Tensor) -> Tensor:
        """Return α_i p_i·v for a direction v of each state, [T, d] to [T, k]."""
        blocks = zip(directions.split(STATES), self.indices.split(STATES), strict=True)
        products = [(v.float() @ prototypes.T).gather(1, i) for v, i in blocks]
        return torch.cat(products) * self.activations


@torch.no_grad()
def route(lm: OpenedModel, z: Tensor) -> Routed:
    """Return the prototypes of states [T, d]."""
    device = lm.model.device
    routings = [lm.head(block.to(device).float()).routing for block in z.split(STATES)]
    return Routed(
        torch.cat([routing.indices for routing in routings]).to(z.device),
        torch.cat([routing.activations for routing in routings]).to(z.device),
    )


def log_probabilities(
    lm: OpenedModel, z: Tensor, tokens: Tensor, *, slopes: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log p of a token at each state [T], and its slope in the state, [T, d] or nothing.

    Both are float32, whatever the model is in.
    """
    weight, bias = weight_of(lm.model).float(), getattr(output_embedding(lm.model), "bias", None)
    bias = None if bias is None else bias.detach().float()
    values, gradients = list[Tensor](), [torch.zeros(0, z.shape[1])]
    for part, wanted in zip(z.split(STATES), tokens.split(STATES), strict=True):
        block = part.to(weight).requires_grad_(slopes)
        with torch.set_grad_enabled(slopes):
            logits = lm.logit_map(F.linear(block, weight, bias))
            own = logits.log_softmax(-1).gather(1, wanted.to(weight.device)[:, None])[:, 0]
        values.append(own.detach().cpu())
        if slopes:
            gradients.append(torch.autograd.grad(own.sum(), block)[0].cpu())
    return torch.cat(values), torch.cat(gradients)


def bank_of(lm: OpenedModel) -> Tensor:
    """Return the prototypes in float32 on the CPU, [K, d]."""
    return lm.head.prototypes.detach().float().cpu()
