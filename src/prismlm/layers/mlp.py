"""GPT-2's MLP, and what can stand in its place: expert MLPs, or unrolled sparse coding."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import check_whole
from prismlm.ops.experts import MLPWeights, check_numbers, choose, mix, mix_mlps
from prismlm.ops.sparse_coding import check_settings, sparse_code


class OutputLinear(nn.Linear):
    """A linear map whose output is added to the stream, so that decoders can start it smaller."""


class MLP(nn.Module):
    """W_down gelu(W_up x): 2 d·m parameters, and d + m more with biases.

    Args:
        width: d.
        inner: m.
        bias: of both matrices.
    """

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = OutputLinear(inner, width, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the transformed positions."""
        return self.down_proj(F.gelu(self.up_proj(x)))


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
        self._biased = bias

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


class SparseCodingOutput(NamedTuple):
    """What the layer gives.

    Attributes:
        output: D a, or the code itself in the complete form.
        code: a ≥ 0; in the complete form m is d.
    """

    output: Float[Tensor, "*batch d"]
    code: Float[Tensor, "*batch m"]


class SparseCoding(nn.Module):
    """A finite number of steps towards a sparse code of z in a learned dictionary.

        overcomplete:   a_0 = 0,   a_{s+1} = ReLU(a_s + η (Dᵀ(z − D a_s) − θ)),   output D a_S
        complete:       a_0 = z,   the same steps,                                output a_S

    Overcomplete, D is [d, m] and the output, a combination of few atoms, is to be added to the
    stream. Complete, D is [d, d] and the output replaces the stream, which is then a sparse code
    itself; one step is CRATE's ISTA block. The dictionary is all there is to learn: d·m parameters,
    half of an MLP's, or d². A point costs 2S products with D overcomplete (an MLP costs 2) and 2S
    with the smaller D complete.

    η and θ are settings. Atoms start normal with standard deviation 1/√d, so of length 1 nearly,
    and ‖D‖₂² near (1 + √(m/d))², 9 at m = 4d: with η = 0.1 the steps descend on the LASSO there.
    Training may raise ‖D‖₂ above that; :func:`prismlm.ops.sparse_coding.largest_step` tells.

    Source: Prism, §4 (future work); Yu et al., White-Box Transformers via Sparse Rate Reduction
    (JMLR 2024), for the complete form; Yang et al., Scaling White-Box Transformers for Vision
    (NeurIPS 2024), for the overcomplete one with its two steps.

    Args:
        width: d.
        atoms: m; None for the complete form.
        steps: S.
        step_size: η.
        threshold: θ.

    Raises:
        InputError: no atoms, no steps, η that is not positive, or θ below 0.
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
        self.dictionary = nn.Parameter(torch.empty(width, width if atoms is None else atoms))
        self.reset_parameters()

    @property
    def initial_deviation(self) -> float:
        """Standard deviation 1/√d of the dictionary's entries at the start."""
        return self.dictionary.shape[0] ** -0.5

    def reset_parameters(self) -> None:
        """Draw the dictionary."""
        nn.init.normal_(self.dictionary, std=self.initial_deviation)

    def forward(self, z: Float[Tensor, "*batch d"]) -> SparseCodingOutput:
        """Code each position.

        Args:
            z: the stream, normalised.
        """
        code = sparse_code(
            z,
            self.dictionary,
            step=self.step_size,
            threshold=self.threshold,
            steps=self.steps,
            start=z if self.complete else None,
        )
        return SparseCodingOutput(code if self.complete else F.linear(code, self.dictionary), code)
