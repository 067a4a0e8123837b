"""A mixture of expert MLPs."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prismlm.layers.mlp import MLP, OutputLinear
from prismlm.ops.experts import MLPWeights, check_numbers, choose, mix, mix_mlps


class ExpertsOutput(NamedTuple):
    """What the layer gives.

    Attributes:
        output: to be added to the stream.
        router_logits: of each position and expert, rows one after the other.
    """

    output: Float[Tensor, "*batch d"]
    router_logits: Float[Tensor, "N E"]


class Experts(nn.Module):
    """A router, and E MLPs of which each position uses k.

        y = Σ_{e among the k largest of R x} w_e MLP_e(x),   w = softmax(R x) over the k

    With k = 1 the weight is softmax over all E, as in Switch. E (2 d·m) + E·d parameters, of which
    a position is multiplied with k (2 d·m) + E·d.

    Compiled, it is one graph; see :func:`~prismlm.ops.experts.mix_mlps`.

    Source: Jiang et al., Mixtral of Experts (2024); Shazeer et al. (2017), named by Prism, §4.

    Args:
        width: d.
        inner: m of each expert.
        experts: E.
        chosen: k.
        bias: of the experts.

    Raises:
        InputError: no expert, or k is not 1 to E.
    """

    def __init__(
        self, width: int, inner: int, experts: int, chosen: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        check_numbers(experts, chosen)
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, inner, bias=bias) for _ in range(experts))
        self._of_one = 2 * width * inner
        self._biased = bias

    @property
    def multiplications(self) -> int:
        """Entries of matrices that one position is multiplied with: k (2 d·m) + E·d."""
        return self.chosen * self._of_one + self.router.weight.numel()

    def kept_bytes(self, size: int) -> int:
        """Return what the backward pass reads of one position, in bytes.

        What the router reads, d; of each of the k experts what it reads and gives, d each, and
        2 m between; of each expert its probability, twice, and its rank.

        Args:
            size: bytes of a number in the products of matrices.
        """
        width, count = self.router.in_features, self.router.out_features
        inner = self._of_one // (2 * width)
        return size * (width + self.chosen * (2 * width + 2 * inner)) + 16 * count

    def forward(self, x: Float[Tensor, "*batch d"]) -> ExpertsOutput:
        """Return the mixture at each position.

        Args:
            x: the stream, normalised.
        """
        rows = x.flatten(0, -2)
        router_logits = self.router(rows)
        choice = choose(router_logits, self.chosen)
        if torch.compiler.is_compiling() and self._only_weights():
            mixed = mix_mlps(rows, choice, self._weights())
        else:
            mixed = mix(rows, choice, list(self.experts))
        return ExpertsOutput(mixed.view_as(x), router_logits)

    def _only_weights(self) -> bool:
        """Say whether experts are what they were built as: no adapter, no hook, whose part counts.

        Else their modules have to be called one by one, which breaks a compiled graph.
        """
        for module in self.experts.modules():
            if type(module) not in (nn.ModuleList, MLP, nn.Linear, OutputLinear):
                return False
            state: Any = module
            hooks = (state._forward_hooks, state._forward_pre_hooks)
            if any(hooks):
                return False
        return True

    def _weights(self) -> MLPWeights:
        experts = cast("list[MLP]", list(self.experts))
        up, down = [e.up_proj for e in experts], [e.down_proj for e in experts]
        return MLPWeights(
            [one.weight for one in up],
            [one.weight for one in down],
            [one.bias for one in up] if self._biased else [],
            [one.bias for one in down] if self._biased else [],
        )
