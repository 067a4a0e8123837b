"""A short convolution over each channel's own past, and the check of what mixers are given."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import InputError, check_whole
from prismlm.ops.sequences import check_flags


def check_rows(x: Tensor, width: int, mask: Tensor | None, starts: Tensor | None) -> None:
    """Raise InputError unless x is [B, T, d] and flags are bool [B, T]."""
    if x.ndim != 3 or x.shape[2] != width or 0 in x.shape:
        raise InputError(
            f"the input of the mixer is {list(x.shape)}: expected [B, T, {width}], with at least "
            "one row and one position."
        )
    check_flags(x.shape[:2], mask=mask, starts=starts)


class CausalConvolution(nn.Module):
    """Mix each channel with its own last values: y_i = Σ_{δ<n} c_δ ⊙ x_{i−δ}.

    What is before a sequence's start counts as zero. Weights are drawn uniformly from ±1/√n.

    Args:
        channels: D.
        width: n, how many positions are mixed, the current one among them.

    Raises:
        InputError: a width below 1.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        check_whole("the width of a convolution", width, 1)
        self.width = width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        history: Float[Tensor, "_ _ _"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B n D"]]:
        """Convolve, and return the last n − 1 inputs for the next call.

        Args:
            x: the inputs.
            history: what an earlier call returned, or None at the start.
            mask: False on padding, which is passed over; what is returned there is of no use.
            starts: True where a sequence starts that sees nothing of what is before it.

        Raises:
            InputError: a history of another batch or of another convolution.
        """
        batch, length, channels = x.shape
        past = self.width - 1
        if history is None:
            history = x.new_zeros(batch, past, channels)
        if history.shape != (batch, past, channels):
            raise InputError(
                f"the state holds the last inputs of a convolution as {list(history.shape)}, and "
                f"the input needs {[batch, past, channels]}: it comes from another batch or layer."
            )
        number = None if starts is None else starts.cumsum(1)[..., None]
        order = ends = None
        if mask is not None:
            # Tokens move to the front of their row, and back in the end.
            order = torch.argsort(~mask, dim=1, stable=True)
            ends = mask.sum(1, keepdim=True) + torch.arange(past, device=x.device)
            x = _taken(x, order)
            number = None if number is None else _taken(number, order)
        extended = torch.cat([history.to(x.dtype), x], 1)
        sequence = None if number is None else F.pad(number, (0, 0, past, 0))
        out = x * self.weight[0]
        for delta in range(1, self.width):
            seen = extended[:, past - delta : past - delta + length]
            if sequence is not None:
                same = sequence[:, past - delta : past - delta + length] == sequence[:, past:]
                seen = seen * same
            out = out + seen * self.weight[delta]
        kept = extended[:, length:] if ends is None else _taken(extended, ends)
        if sequence is not None and starts is not None:
            numbers = sequence[:, length:] if ends is None else _taken(sequence, ends)
            kept = kept * (numbers == starts.sum(1)[:, None, None])
        return out if order is None else _taken(out, order.argsort(1)), kept


def _taken(x: Shaped[Tensor, "B T F"], places: Int64[Tensor, "B n"]) -> Shaped[Tensor, "B n F"]:
    # Not take_along_dim, which fixes sizes.
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
