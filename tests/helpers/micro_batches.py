"""A step's rows, how they are split into micro-batches, and gradients compared."""

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
    """Rows with between 3 and 10 tokens, so that means of means are not the mean."""
    rows = batch(count, 10)
    lengths = torch.tensor([10, 3, 9, 4, 10, 8, 3, 10])[:count, None]
    rows["token_mask"] = torch.arange(10) < lengths
    rows["labels"] = rows["labels"].masked_fill(~rows["token_mask"], -100)
    rows["labels"][0, 5] = -100
    return rows


def split(rows, *sizes):
    parts = [dict(zip(rows, chunk, strict=True)) for chunk in _chunks(rows, sizes)]
    assert sum(len(part["input_ids"]) for part in parts) == len(rows["input_ids"])
    return parts


def _chunks(rows, sizes):
    return zip(*(value.split(list(sizes)) for value in rows.values()), strict=True)


def assert_same(first, second, *, rtol=2e-5):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=rtol, atol=2e-7, msg=name)
