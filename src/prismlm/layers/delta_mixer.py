"""DeltaNet's mixer: short convolutions, the delta rule, and a norm per head."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.layers.causal_convolution import CausalConvolution, check_rows
from prismlm.ops.delta_rule import delta_rule
from prismlm.ops.tensors import at_least_float32


class DeltaState(NamedTuple):
    """The recurrent state: S of each head, and the convolutions' history [B, n − 1, 3 d]."""

    memory: Float[Tensor, "B H K K"]
    history: Tensor


class DeltaOutput(NamedTuple):
    """The output (zero on padding), the state, and as evidence the rates b [B, T, H]."""

    output: Float[Tensor, "B T d"]
    state: DeltaState
    evidence: Tensor | None


class DeltaMixer(nn.Module):
    """Mix positions by the delta rule with H heads of d / H.

        q, k, v = silu(conv(W x)),   k and q of norm 1, q / √(d/H),   b = sigmoid(W_b x)
        y = W_o RMSNorm(delta_rule(q, k, v, b))

    Source: DeltaNet (Yang et al., 2024), the baseline of ProtoT, §4.
    """

    def __init__(self, width: int, heads: int = 4, *, convolution_width: int = 4) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InputError(f"{heads} heads do not divide a width of {width}.")
        self.heads = heads
        self.qkv_projection = nn.Linear(width, 3 * width, bias=False)
        self.convolution = CausalConvolution(3 * width, convolution_width)
        self.rate_projection = nn.Linear(width, heads, bias=False)
        self.norm = nn.RMSNorm(width // heads, eps=1e-5)
        self.output_projection = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B T d"],
        *,
        state: DeltaState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        return_evidence: bool = False,
    ) -> DeltaOutput:
        """Mix one or more positions; arguments as for :class:`PrototypeMixer`."""
        memory, history = (None, None) if state is None else state
        check_rows(x, self.qkv_projection.in_features, memory)
        mixed, history = self.convolution(
            self.qkv_projection(x), history=history, mask=mask, starts=starts
        )
        q, k, v = F.silu(mixed).reshape(*x.shape[:2], 3, self.heads, -1).unbind(2)
        rates = at_least_float32(self.rate_projection(x)).sigmoid()
        out, memory = delta_rule(
            F.normalize(at_least_float32(q), dim=-1) * q.shape[-1] ** -0.5,
            F.normalize(at_least_float32(k), dim=-1),
            v,
            rates,
            memory,
            mask=mask,
            starts=starts,
        )
        output = self.output_projection(self.norm(out).flatten(2))
        if mask is not None:
            rates = rates.masked_fill(~mask[..., None], 0)
        evidence = rates if return_evidence else None
        return DeltaOutput(output, DeltaState(memory, history), evidence)
