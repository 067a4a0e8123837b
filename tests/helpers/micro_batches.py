"""Rows of a step that differ in length."""

import torch

from prismlm.training import LossWeights
from tests.helpers.tiny_head import batch

WEIGHTS = LossWeights(
    prototype_pull=0.8,
    point_pull=0.5,
    residual=0.7,
    diversity=0.9,
    prototype_only_ce=0.3,
    prototype_only_kl=0.2,
)


def uneven_rows(count=8):
    """Rows with between 3 and 10 tokens."""
    rows = batch(count, 10)
    lengths = torch.tensor([10, 3, 9, 4, 10, 8, 3, 10])[:count, None]
    rows["token_mask"] = torch.arange(10) < lengths
    rows["labels"] = rows["labels"].masked_fill(~rows["token_mask"], -100)
    rows["labels"][0, 5] = -100
    return rows
