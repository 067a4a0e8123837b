"""States of texts, read once: their prototypes, and log-probabilities of the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.lens.opened_model import OpenedModel
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter

# States at once; larger blocks are slower on a CPU.
BATCH_TOKENS, STATES = 2048, 128


class Text(NamedTuple):
    """Tokens of a text; those from ``start`` on are predicted."""

    ids: list[int]
    start: int


class Read(NamedTuple):
    """States before N predicted tokens, these tokens, and the number of each one's text."""

    z: Tensor
    targets: Tensor
    text: Tensor


class Routed(NamedTuple):
    """Active prototypes of states and their activations, [T, k]."""

    indices: Tensor
    activations: Tensor

    def along(self, directions: Tensor, prototypes: Tensor) -> Tensor:
        """Return α_i p_i·v for a direction v of each state, [T, d] to [T, k]."""
        blocks = zip(directions.split(STATES), self.indices.split(STATES), strict=True)
        products = [(v.float() @ prototypes.T).gather(1, i) for v, i in blocks]
        return torch.cat(products) * self.activations


def last_states(lm: OpenedModel, ids: Tensor) -> Tensor:
    """Return z of every token, [B, T] to [B, T, d]."""
    with capture(lm.model, logits=False) as captured:
        lm.model(input_ids=ids.to(lm.model.device), use_cache=False)
    return captured.z


@torch.no_grad()
def read(
    lm: OpenedModel, texts: Sequence[Text], before: Sequence[int] = (), progress: Reporter = SILENT
) -> Read:
    """Run the model over texts, each after the tokens ``before``, in batches of like lengths.

    Texts that differ in their last token alone share a row.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, (ids, _) in enumerate(texts):
        rows.setdefault((*before, *(ids[:-1] or ids)), []).append(number)
    order, parts = sorted(rows, key=len), list[tuple[Tensor, Tensor, Tensor]]()
    with progress.task("Reading", len(order), "texts") as task:
        while order:
            size = max(1, BATCH_TOKENS // (len(order[-1]) + 1))
            batch, order = order[-size:], order[:-size]
            # Padded on the right, which a causal model does not see.
            padded = pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
            for z, row in zip(last_states(lm, padded), batch, strict=True):
                for number in rows[row]:
                    ids, start = texts[number]
                    states = z[len(before) + start - 1 : len(before) + len(ids) - 1].clone()
                    tokens = torch.tensor(ids[start:], device=z.device)
                    parts.append((states, tokens, torch.full_like(tokens, number)))
            task.advance(len(batch))
    return Read(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def route(lm: OpenedModel, z: Tensor) -> Routed:
    """Return the prototypes of states [T, d]."""
    blocks = (lm.head(block.to(lm.model.device).float()).routing for block in z.split(STATES))
    columns = zip(*((r.indices, r.activations) for r in blocks), strict=True)
    return Routed(*(torch.cat(column).to(z.device) for column in columns))


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
