"""Mixtures of experts with tokens grouped by expert: each expert is called once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.precision import at_least_float32

Experts = Sequence[Callable[[Tensor], Tensor]]


class ExpertChoice(NamedTuple):
    """The experts of each token, by descending probability; ties go to the lower index."""

    experts: Int64[Tensor, "N k"]
    weights: Float[Tensor, "N k"]


def check_numbers(experts: int, chosen: int) -> None:
    """Raise InputError unless 1 ≤ k ≤ E."""
    if experts < 1:
        raise InputError(f"a mixture of {experts} experts: expected at least 1.")
    if not 1 <= chosen <= experts:
        raise InputError(
            f"{chosen} experts per token of a mixture of {experts}: expected 1 to {experts}."
        )


def choose(router_logits: Float[Tensor, "N E"], chosen: int) -> ExpertChoice:
    """Return the k most likely experts of each token, with float32 weights or wider.

        p = softmax(router_logits)
        w_e = p_e / Σ_{e' chosen} p_e' for k > 1,   w_e = p_e for k = 1

    A single weight that is normalised would always be 1, without a gradient for the router.

    Source: Jiang et al., Mixtral of Experts (2024), for k > 1; Fedus et al., Switch Transformers
    (JMLR 2022), for k = 1.
    """
    check_numbers(router_logits.shape[-1], chosen)
    probabilities = at_least_float32(router_logits).softmax(-1)
    sorted_p, order = torch.sort(probabilities, stable=True, dim=-1, descending=True)
    weights = sorted_p[:, :chosen]
    if chosen > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return ExpertChoice(order[:, :chosen], weights)


def mix(x: Float[Tensor, "N d"], choice: ExpertChoice, experts: Experts) -> Float[Tensor, "N d"]:
    """Return Σ_j w_nj · expert_{e_nj}(x_n) over the k experts of each token.

    ``experts`` map [M, d] to [M, d] row by row. One without tokens is called with zero rows, so
    that its weights have a gradient of 0, which other processes wait for. Outputs are gathered
    rather than added atomically, so they are deterministic. In programs of torch.export, whose
    shapes cannot depend on the choice, every expert is called with all rows.
    """
    if torch.compiler.is_exporting():
        dense = torch.stack([expert(x) for expert in experts], 1)
        index = choice.experts[..., None].expand(-1, -1, dense.shape[-1])
        return _weighted_sum(dense.gather(1, index), choice)
    return _grouped(x, choice, experts)


def _grouped_rows(x: Tensor, choice: ExpertChoice, experts: Experts) -> Tensor:
    expert_of_row, order = choice.experts.flatten().sort(stable=True)
    counts = torch.bincount(expert_of_row, minlength=len(experts)).cpu()
    rows = torch.split(x[order // choice.experts.shape[1]], [int(count) for count in counts])
    groups = zip(experts, rows, strict=True)
    outputs = torch.cat([expert(group) for expert, group in groups])
    return _weighted_sum(outputs[order.argsort()].view(*choice.experts.shape, -1), choice)


# Sizes depend on the choice, so compiled blocks run it as it is.
_grouped: Callable[[Tensor, ExpertChoice, Experts], Tensor] = cast(Any, torch.compiler).disable(
    _grouped_rows
)


def _weighted_sum(outputs: Float[Tensor, "N k d"], choice: ExpertChoice) -> Float[Tensor, "N d"]:
    return (outputs * choice.weights[..., None]).sum(1).to(outputs.dtype)
