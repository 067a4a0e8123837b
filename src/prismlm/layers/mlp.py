"""GPT-2's MLP."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


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
