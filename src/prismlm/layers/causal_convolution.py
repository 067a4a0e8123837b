"""A short causal convolution over each channel, and the input check that mixers share."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import InputError, check_whole
from prismlm.ops.tensors import check_axes


def check_rows(x: Tensor, width: int, memory: Tensor | None) -> None:
    """Raise InputError unless x is [B, T, d] and ``memory``, a state, has B rows."""
    if x.ndim != 3 or x.shape[2] != width or 0 in x.shape:
        raise InputError(
            f"the input of the mixer is {list(x.shape)}: expected [B, T, {width}], with at least "
            "one row and one position."
        )
    if memory is not None and len(memory) != len(x):
        raise InputError(
            f"the state has {len(memory)} rows, and the input {len(x)}: it comes from another "
            "batch or layer."
        )


class CausalConvolution(nn.Module):
    """A depthwise convolution of n positions: y_i = Σ_{δ<n} c_δ ⊙ x_{i−δ}.

    Values before a sequence's start count as zero. Weights start uniform in ±1/√n.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        check_whole("the width of a convolution", width, 1)
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.weight.data.copy_(self.initial_values()["weight"])

    def initial_values(self) -> dict[str, Tensor]:
        """Draw the weights."""
        bound = self.width**-0.5
        return {"weight": torch.empty(self.weight.shape).uniform_(-bound, bound)}

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        history: Float[Tensor, "_ _ _"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B n D"]]:
        """Convolve, and return the last n − 1 inputs, the history for the next call.

        ``mask`` is False on padding, which is skipped; outputs there are undefined. ``starts`` is
        True where a new sequence begins, which sees nothing before it.
        """
        check_axes(
            x=("B T D", x),
            kernel=("n D", self.weight[1:]),
            history=("B n D", history),
            mask=("B T", mask),
            starts=("B T", starts),
        )
        batch, length, channels = x.shape
        past = self.width - 1
        if history is None:
            history = x.new_zeros(batch, past, channels)
        sequence = None if starts is None else starts.cumsum(1)[..., None]
        order = ends = None
        if mask is not None:
            # Move tokens to the front of their row, and back at the end.
            order = torch.argsort(~mask, dim=1, stable=True)
            ends = mask.sum(1, keepdim=True) + torch.arange(past, device=x.device)
            x = _gather(x, order)
            sequence = None if sequence is None else _gather(sequence, order)
        extended = torch.cat([history.to(x.dtype), x], 1)
        if sequence is not None:
            sequence = F.pad(sequence, (0, 0, past, 0))
        out = x * self.weight[0]
        for delta in range(1, self.width):
            earlier = slice(past - delta, past - delta + length)
            inputs = extended[:, earlier]
            if sequence is not None:
                inputs = inputs * (sequence[:, earlier] == sequence[:, past:])
            out = out + inputs * self.weight[delta]
        last = extended[:, length:] if ends is None else _gather(extended, ends)
        if sequence is not None and starts is not None:
            sequences = sequence[:, length:] if ends is None else _gather(sequence, ends)
            last = last * (sequences == starts.sum(1)[:, None, None])
        return out if order is None else _gather(out, order.argsort(1)), last


def _gather(x: Shaped[Tensor, "B T F"], positions: Int64[Tensor, "B n"]) -> Shaped[Tensor, "B n F"]:
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))
