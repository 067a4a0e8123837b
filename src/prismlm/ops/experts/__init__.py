"""Mixtures of experts: top-k routing, and the weighted sum of the experts' outputs."""

from prismlm.ops.experts.grouped import ExpertChoice, check_numbers, choose, mix

__all__ = ["ExpertChoice", "check_numbers", "choose", "mix"]
