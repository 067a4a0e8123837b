"""A few thousand parameters of Llama with a prototype head, and batches for them."""

import torch

from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.training import LossWeights, PrismForCausalLM

VOCABULARY = 50
# The source's losses alone.
PULLS = LossWeights(
    prototype_pull=0.1, point_pull=0.1, residual=0.1, diversity=0.0, prototype_only_kl=0.0
)
WEIGHTS = LossWeights(
    prototype_pull=0.8,
    point_pull=0.5,
    residual=0.7,
    diversity=0.9,
    prototype_only_ce=0.3,
    prototype_only_kl=0.2,
)


def make(*, initialised=True, detach=False, weights=PULLS, **overrides):
    torch.manual_seed(0)
    settings = {"preset": "llama-tiny", "num_hidden_layers": 1, "hidden_size": 24} | overrides
    backbone = build_model(build_config(settings, VOCABULARY, 0))
    head = PrototypeHead(24, 12, 3)
    head.reset_parameters(torch.Generator().manual_seed(1))
    return PrismForCausalLM(backbone, head, weights=weights, detach=detach, initialised=initialised)


def batch(rows=2, length=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    position_ids = torch.arange(length).expand(rows, -1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return {"input_ids": ids, "labels": ids, "position_ids": position_ids, "token_mask": mask}


def uneven_rows(count=8):
    """Rows with between 3 and 10 tokens."""
    rows = batch(count, 10)
    lengths = torch.tensor([10, 3, 9, 4, 10, 8, 3, 10])[:count, None]
    rows["token_mask"] = torch.arange(10) < lengths
    rows["labels"] = rows["labels"].masked_fill(~rows["token_mask"], -100)
    rows["labels"][0, 5] = -100
    return rows
