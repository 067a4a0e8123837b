"""Mixtures of experts: which experts a token goes to, their sum, and how even that is."""

from prismlm.ops.experts.balance import load_balancing_loss
from prismlm.ops.experts.choice import ExpertRoutes, check_numbers, route
from prismlm.ops.experts.grouped import MLPWeights, mix, mix_mlps
from prismlm.ops.experts.linear import grouped_linear

__all__ = [
    "ExpertRoutes",
    "MLPWeights",
    "check_numbers",
    "grouped_linear",
    "load_balancing_loss",
    "mix",
    "mix_mlps",
    "route",
]
