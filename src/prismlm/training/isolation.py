"""Whether documents that share a training row are kept apart by a model."""

from __future__ import annotations

from typing import Any

import torch

from prismlm.models.evaluating import evaluating
from prismlm.models.sidecar import weight_of

PIECE = 8
# Of the largest logit. A mask makes the difference exactly 0; a state that is carried over can
# weigh as little as a thousandth in a model that has learned nothing yet.
TOLERANCE = 1e-5


@torch.no_grad()
def keeps_documents_apart(model: Any) -> bool:
    """Say whether a document changes nothing for the next one in its row.

    Most decoders derive a mask from position ids that start at 0 again; recurrent ones and some
    with positions of their own do not. In shared rows they would learn, and be attributed, across
    documents that have nothing to do with each other.
    """
    weight = weight_of(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weight.shape[0], (3, PIECE), generator=generator)
    rows = torch.stack([torch.cat([tokens[0], tokens[2]]), torch.cat([tokens[1], tokens[2]])])
    position_ids = torch.arange(PIECE).repeat(2).expand(2, -1)
    with evaluating(model):
        logits = model(
            input_ids=rows.to(weight.device),
            position_ids=position_ids.to(weight.device),
            use_cache=False,
        ).logits[:, PIECE:]
    difference = (logits[0] - logits[1]).abs().max().item()
    return difference <= TOLERANCE * logits.abs().max().item()
