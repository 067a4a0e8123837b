"""Linear maps of groups of rows, as one operation of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(
    x: Float[Tensor, "M d"],
    counts: Int64[Tensor, " E"],
    weights: Sequence[Float[Tensor, "m d"]],
    biases: Sequence[Float[Tensor, " m"]] = (),
) -> Float[Tensor, "M m"]:
    """Return W_e x + b_e for the rows of each group: the first counts_0 rows with W_0, and so on.

    torch.compile sees an operation whose output has as many rows as its input, and not the split,
    whose shapes only the data know. A group without rows has a gradient of 0. Gradients of
    gradients there are none.

    Args:
        x: rows, a group after the other.
        counts: rows of each group; they add up to M.
        weights: of each group.
        biases: of each group, or none.
    """
    return _grouped_linear(x, counts, list(weights), list(biases))


@torch.library.custom_op(
    "prismlm::grouped_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor counts, Tensor[] weights, Tensor[] biases) -> Tensor",
)
def _grouped_linear(
    x: Tensor, counts: Tensor, weights: list[Tensor], biases: list[Tensor]
) -> Tensor:
    out = x.new_empty(len(x), len(weights[0]))
    for number, (own, into) in enumerate(_groups(counts, x, out)):
        into.copy_(F.linear(own, weights[number], biases[number] if biases else None))
    return out


@_grouped_linear.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: Tensor, counts: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


@torch.library.custom_op(
    "prismlm::grouped_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor counts, Tensor[] weights, bool biased) -> Tensor[]",
)
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, counts: Tensor, weights: list[Tensor], biased: bool
) -> list[Tensor]:
    """Return the gradient of x, then those of the weights, then those of the biases."""
    of_x = torch.empty_like(x)
    of_weights: list[Tensor] = []
    of_biases: list[Tensor] = []
    for weight, (own, rows, into) in zip(weights, _groups(counts, grad, x, of_x), strict=True):
        into.copy_(own @ weight)
        of_weights.append(own.mT @ rows)
        if biased:
            of_biases.append(own.sum(0))
    return [of_x, *of_weights, *of_biases]


@_grouped_linear_backward.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(grad: Tensor, x: Tensor, counts: Tensor, weights: list[Tensor], biased: bool) -> list[Tensor]:
    of_biases = [weight.new_empty(weight.shape[0]) for weight in weights] if biased else []
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights), *of_biases]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, counts, weights, biases = inputs
    ctx.biased = bool(biases)
    ctx.save_for_backward(x, counts, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, list[Tensor], list[Tensor]]:
    x, counts, *weights = ctx.saved_tensors
    of_x, *rest = _grouped_linear_backward(grad.contiguous(), x, counts, weights, ctx.biased)
    return of_x, None, rest[: len(weights)], rest[len(weights) :]


_grouped_linear.register_autograd(  # pyright: ignore[reportUnknownMemberType]
    _backward, setup_context=_save
)


def _groups(counts: Tensor, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Return each group's rows of each tensor."""
    numbers = [int(count) for count in counts.cpu()]
    return list(zip(*(torch.split(each, numbers) for each in rows), strict=True))
