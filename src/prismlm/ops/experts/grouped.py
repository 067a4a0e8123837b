"""The sum of what experts make of a token, each expert called once with all of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.experts.choice import ExpertChoice
from prismlm.ops.experts.linear import grouped_linear


def mix(
    x: Float[Tensor, "N d"], choice: ExpertChoice, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Float[Tensor, "N d"]:
    """Return Σ_j w_nj · expert_{e_nj}(x_n) over the k experts of each token.

    An expert without tokens is called with none, so that its weights have a gradient, of 0: other
    processes wait for it. Sums are by position and not by atomic additions, so they do not vary.

    Args:
        x: tokens.
        choice: of :func:`choose`.
        experts: what maps [M, d] to [M, d] row by row, one for each number in the choice.
    """
    order = _order(choice)
    counts = torch.bincount(choice.experts.flatten(), minlength=len(experts))
    given = torch.split(_rows(x, order, choice), [int(count) for count in counts.cpu()])
    found = torch.cat([expert(own) for expert, own in zip(experts, given, strict=True)])
    return _summed(found, order, choice)


class MLPWeights(NamedTuple):
    """The weights of E MLPs, x → W_down gelu(W_up x + b_up) + b_down.

    Attributes:
        up: W_up of each, [m, d].
        down: W_down of each, [d, m].
        up_bias: b_up of each, [m], or nothing.
        down_bias: b_down of each, [d], or nothing.
    """

    up: Sequence[Float[Tensor, "m d"]]
    down: Sequence[Float[Tensor, "d m"]]
    up_bias: Sequence[Float[Tensor, " m"]] = ()
    down_bias: Sequence[Float[Tensor, " d"]] = ()


def mix_mlps(
    x: Float[Tensor, "N d"], choice: ExpertChoice, weights: MLPWeights
) -> Float[Tensor, "N d"]:
    """Return what :func:`mix` does with MLPs, in one graph where it is compiled.

    No shape depends on which expert has how many tokens; only inside of
    :func:`~prismlm.ops.experts.linear.grouped_linear`, which a graph holds as one operation, are
    they counted. It keeps what :func:`mix` keeps for the backward pass.

    Args:
        x: tokens.
        choice: of :func:`choose`.
        weights: of the experts.
    """
    order = _order(choice)
    counts = _counts(choice.experts.flatten()[order], len(weights.up))
    given = _rows(x, order, choice)
    if torch.is_autocast_enabled(x.device.type):
        # An operation of one's own is not cast by autocast.
        dtype = torch.get_autocast_dtype(x.device.type)
        given = given.to(dtype)
        weights = MLPWeights(*([one.to(dtype) for one in kind] for kind in weights))
    inner = grouped_linear(given, counts, weights.up, weights.up_bias)
    found = grouped_linear(F.gelu(inner), counts, weights.down, weights.down_bias)
    return _summed(found, order, choice)


def _order(choice: ExpertChoice) -> Int64[Tensor, " M"]:
    """Return the N·k uses of experts sorted by expert, in the order of tokens within each."""
    return choice.experts.flatten().argsort(stable=True)


def _counts(sorted_experts: Int64[Tensor, " M"], experts: int) -> Int64[Tensor, " E"]:
    """Return how often each expert is used; of a shape that is known before."""
    numbers = torch.arange(experts, device=sorted_experts.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _rows(x: Tensor, order: Tensor, choice: ExpertChoice) -> Float[Tensor, "M d"]:
    return x[order // choice.experts.shape[1]]


def _summed(found: Tensor, order: Tensor, choice: ExpertChoice) -> Float[Tensor, "N d"]:
    back = found[order.argsort()].view(*choice.experts.shape, -1)
    return (back * choice.weights[..., None]).sum(1).to(found.dtype)
