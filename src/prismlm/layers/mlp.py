"""The two matrices of GPT-2's MLP."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


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

    @property
    def multiplications(self) -> int:
        """Entries of matrices that one position is multiplied with: 2 d·m."""
        return self.up_proj.weight.numel() + self.down_proj.weight.numel()

    def kept_bytes(self, size: int) -> int:
        """Return what the backward pass reads of one position, in bytes: d + 2 m numbers.

        Args:
            size: bytes of a number in the products of matrices.
        """
        return size * (self.up_proj.in_features + 2 * self.up_proj.out_features)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the transformed positions."""
        return self.down_proj(F.gelu(self.up_proj(x)))
