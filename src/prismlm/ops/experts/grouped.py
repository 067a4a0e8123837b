"""Mixtures of experts: which a token goes to, how even that is, the sum of what they make of it.

Each expert is called once, with all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError


class ExpertChoice(NamedTuple):
    """Which experts tokens go to.

    Attributes:
        experts: the k experts of each token, the likeliest first; ties to the lower number.
        weights: what each of them counts, float32 or wider.
    """

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


def probabilities(router_logits: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch E"]:
    """Return softmax over the experts, in float32 at least."""
    dtype = torch.promote_types(router_logits.dtype, torch.float32)
    return router_logits.softmax(-1, dtype=dtype)


def choose(router_logits: Float[Tensor, "N E"], chosen: int) -> ExpertChoice:
    """Return the k likeliest experts of each token, and their weights.

        p = softmax(router_logits)
        w_e = p_e / Σ_{e' chosen} p_e' for k > 1,   w_e = p_e for k = 1

    A single weight divided by itself would be 1, and the router would have no gradient from what
    its choice leads to.

    Source: Jiang et al., Mixtral of Experts (2024), for k > 1; Fedus et al., Switch Transformers
    (JMLR 2022), for k = 1.

    Args:
        router_logits: of each token and expert.
        chosen: k.

    Raises:
        InputError: k is not 1 to E, or there is no expert.
    """
    check_numbers(router_logits.shape[-1], chosen)
    p, order = torch.sort(probabilities(router_logits), stable=True, dim=-1, descending=True)
    weights = p[:, :chosen]
    if chosen > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return ExpertChoice(order[:, :chosen], weights)


def load_balancing_loss(
    router_logits: Sequence[Float[Tensor, "N E"]],
    chosen: int,
    mask: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, ""]:
    """Return the load-balancing loss of a model's routers, as Hugging Face's models do.

        E Σ_e f_e P_e,   f_e = mean of [e is among the k of a token],   P_e = mean of p_e

    Means run over the tokens of all layers together, E and k being the same in each: what is
    pressed for is that an expert's number is used evenly through the model, not layer by layer.
    It is k where f or P is even and E·p̄ where every token goes to the same experts, with p̄ their
    summed probability; the gradient comes through P. Without a token it is 0.

    Source: Fedus et al., Switch Transformers (JMLR 2022), Eq. 4 to 6.

    Args:
        router_logits: of each layer.
        chosen: k.
        mask: false on padding, which does not count.

    Raises:
        InputError: no layer, layers of other shapes, a mask of another length, or k not 1 to E.
    """
    shapes = {tuple(logits.shape) for logits in router_logits}
    if len(shapes) != 1:
        raise InputError(
            f"router logits are {sorted(shapes)}: expected those of one layer or more, [N, E] each."
        )
    logits = torch.stack(list(router_logits))
    count = logits.shape[-1]
    if mask is not None and mask.shape != logits.shape[1:2]:
        raise InputError(f"the mask is {list(mask.shape)}: expected {list(logits.shape[1:2])}.")
    used = F.one_hot(choose(logits.flatten(0, 1), chosen).experts, count).sum(1)
    p = probabilities(logits).flatten(0, 1)
    kept = p.new_ones(len(p)) if mask is None else mask.to(p.dtype).repeat(len(logits))
    total = kept.sum().clamp_min(1)
    return count * torch.dot(kept @ used.to(p.dtype), kept @ p) / total.square()


@torch.library.custom_op(
    "prismlm::grouped_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor counts, Tensor[] weights, Tensor[] biases) -> Tensor",
)
def grouped_linear(
    x: Float[Tensor, "M d"],
    counts: Int64[Tensor, " E"],
    weights: Sequence[Float[Tensor, "m d"]],
    biases: Sequence[Float[Tensor, " m"]],
) -> Float[Tensor, "M m"]:
    """Return W_e x + b_e for the rows of each group: the first counts_0 rows with W_0, and so on.

    torch.compile sees an operation whose output has as many rows as its input, and not the split,
    whose shapes only the data know. A group without rows has a gradient of 0. Gradients of
    gradients there are none.

    Args:
        x: rows, a group after the other.
        counts: rows of each group; they add up to M.
        weights: W_e of each group, not stacked: that would be a copy, kept for the backward pass.
        biases: b_e of each group, or none.
    """
    groups = zip(_split(x, counts), weights, biases or [None] * len(weights), strict=True)
    return torch.cat([F.linear(rows, weight, bias) for rows, weight, bias in groups])


@grouped_linear.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: Tensor, counts: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


@torch.library.custom_op(
    "prismlm::grouped_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor counts, int groups) -> Tensor[]",
)
def _of_weights(grad: Tensor, x: Tensor, counts: Tensor, groups: int) -> list[Tensor]:
    """Return the gradients of the weights, then those of the biases."""
    own = list(zip(_split(grad, counts), _split(x, counts), strict=True))
    return [g.mT @ rows for g, rows in own] + [g.sum(0) for g, _ in own]


@_of_weights.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(grad: Tensor, x: Tensor, counts: Tensor, groups: int) -> list[Tensor]:
    sizes = [(grad.shape[1], x.shape[1])] * groups + [(grad.shape[1],)] * groups
    return [x.new_empty(size) for size in sizes]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, counts, weights, biases = inputs
    ctx.save_for_backward(x, counts, *weights)
    ctx.biased = bool(biases)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[Tensor], list[Tensor]]:
    x, counts, *weights = ctx.saved_tensors
    found = _of_weights(grad, x, counts, len(weights))
    of_x = grouped_linear(grad, counts, [weight.mT for weight in weights], [])
    return of_x, None, found[: len(weights)], found[len(weights) :] if ctx.biased else []


grouped_linear.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _backward, setup_context=_save
)


def _split(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, [int(count) for count in counts.cpu()])


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
    order, counts, rows = _grouped(x, choice, len(experts))
    groups = zip(experts, _split(rows, counts), strict=True)
    return _summed(torch.cat([expert(own) for expert, own in groups]), order, choice)


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

    No shape depends on which expert has how many tokens; only inside of :func:`grouped_linear`,
    which a graph holds as one operation, are they counted. It keeps what :func:`mix` keeps for the
    backward pass.

    Args:
        x: tokens.
        choice: of :func:`choose`.
        weights: of the experts.
    """
    order, counts, rows = _grouped(x, choice, len(weights.up))
    if torch.is_autocast_enabled(x.device.type):
        # An operation of one's own is not cast by autocast.
        dtype = torch.get_autocast_dtype(x.device.type)
        rows = rows.to(dtype)
        weights = MLPWeights(*([one.to(dtype) for one in kind] for kind in weights))
    inner = grouped_linear(rows, counts, weights.up, weights.up_bias)
    found = grouped_linear(F.gelu(inner), counts, weights.down, weights.down_bias)
    return _summed(found, order, choice)


def _grouped(x: Tensor, choice: ExpertChoice, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the N·k uses sorted by expert, how many each has, and their tokens' rows."""
    used, order = choice.experts.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=used.device)
    counts = torch.searchsorted(used, numbers, right=True) - torch.searchsorted(used, numbers)
    return order, counts, x[order // choice.experts.shape[1]]


def _summed(found: Tensor, order: Tensor, choice: ExpertChoice) -> Float[Tensor, "N d"]:
    back = found[order.argsort()].view(*choice.experts.shape, -1)
    return (back * choice.weights[..., None]).sum(1).to(found.dtype)
