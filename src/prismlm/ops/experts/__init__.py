"""Mixtures of experts: which experts a token goes to, their sum, and how even that is."""

from prismlm.ops.experts.grouped import (
    ExpertChoice,
    MLPWeights,
    check_numbers,
    choose,
    grouped_linear,
    load_balancing_loss,
    mix,
    mix_mlps,
)

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
