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
