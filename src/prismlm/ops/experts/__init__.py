"""Mixtures of experts: which experts a token goes to, their sum, and how even that is."""

from prismlm.ops.experts.balance import load_balancing_loss
from prismlm.ops.experts.choice import ExpertChoice, check_numbers, choose
from prismlm.ops.experts.grouped import MLPWeights, mix, mix_mlps
from prismlm.ops.experts.linear import grouped_linear

__all__ = [
    "ExpertChoice",
    "MLPWeights",
    "check_numbers",
    "choose",
    "grouped_linear",
    "load_balancing_loss",
    "mix",
    "mix_mlps",
]
