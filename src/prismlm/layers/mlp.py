"""GPT-2's MLP and its alternatives: a mixture of expert MLPs, or unrolled sparse coding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import check_whole
from prismlm.ops.experts import check_numbers, choose, mix
from prismlm.ops.sparse_coding import check_settings, sparse_code


class OutputLinear(nn.Linear):
    """A linear map added to the residual stream, which decoders initialise with smaller weights."""


class MLP(nn.Module):
    """W_down gelu(W_up x), of width d and inner width m."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = OutputLinear(inner, width, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Apply the MLP."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class ExpertsOutput(NamedTuple):
    """The mixture, to be added to the residual stream, and the router's logits."""

    output: Float[Tensor, "*batch d"]
    router_logits: Float[Tensor, "N E"]


class Experts(nn.Module):
    """A router and E MLPs, of which each position uses k.

        y = Σ_{e among the k largest of R x} w_e MLP_e(x),   w = softmax(R x) over the k

    With k = 1 the weight is softmax over all E, as in Switch.

    Source: Jiang et al., Mixtral of Experts (2024); Shazeer et al. (2017), named by Prism, §4.
    """

    def __init__(
        self, width: int, inner: int, experts: int, chosen: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        check_numbers(experts, chosen)
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, inner, bias=bias) for _ in range(experts))

    def forward(self, x: Float[Tensor, "*batch d"]) -> ExpertsOutput:
        """Return the mixture at each position of the normalised stream."""
        rows = x.flatten(0, -2)
        router_logits = self.router(rows)
        mixed = mix(rows, choose(router_logits, self.chosen), list(self.experts))
        return ExpertsOutput(mixed.view_as(x), router_logits)


class SparseCodingOutput(NamedTuple):
    """D a (in the complete form the code itself), and the code a ≥ 0."""

    output: Float[Tensor, "*batch d"]
    code: Float[Tensor, "*batch m"]


class SparseCoding(nn.Module):
    """A finite number of steps towards a sparse code of z in a learned dictionary D.

        overcomplete:   a_0 = 0,   a_{s+1} = ReLU(a_s + η (Dᵀ(z − D a_s) − θ)),   output D a_S
        complete:       a_0 = z,   the same steps,                                output a_S

    Overcomplete, D is [d, m] and the output is added to the residual stream. Complete (``atoms`` is
    None), D is [d, d] and the output replaces the stream; one step is CRATE's ISTA block.

    η and θ are fixed. Entries of D start with standard deviation 1/√d, so that atoms have length
    near 1 and ‖D‖₂² is near (1 + √(m/d))²: at m = 4d, steps with η = 0.1 descend on the LASSO.
    Training may raise ‖D‖₂; see :func:`prismlm.ops.sparse_coding.largest_step`.

    Source: Prism, §4 (future work); Yu et al., White-Box Transformers via Sparse Rate Reduction
    (JMLR 2024), for the complete form; Yang et al., Scaling White-Box Transformers for Vision
    (NeurIPS 2024), for the overcomplete form with its two steps.
    """

    def __init__(
        self,
        width: int,
        atoms: int | None = None,
        *,
        steps: int = 1,
        step_size: float = 0.1,
        threshold: float = 0.1,
    ) -> None:
        super().__init__()
        check_settings(step_size, threshold, steps)
        if atoms is not None:
            check_whole("the number of atoms of a dictionary", atoms, 1)
        self.complete = atoms is None
        self.steps = steps
        self.step_size = step_size
        self.threshold = threshold
        self.initial_deviation = width**-0.5
        dictionary = torch.randn(width, width if atoms is None else atoms) * self.initial_deviation
        self.dictionary = nn.Parameter(dictionary)

    def forward(self, z: Float[Tensor, "*batch d"]) -> SparseCodingOutput:
        """Code each position of the normalised stream."""
        code = sparse_code(
            z,
            self.dictionary,
            step=self.step_size,
            threshold=self.threshold,
            steps=self.steps,
            start=z if self.complete else None,
        )
        return SparseCodingOutput(code if self.complete else F.linear(code, self.dictionary), code)
