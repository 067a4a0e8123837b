"""A short convolution over each channel's own past."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError, check_whole
from prismlm.ops.compaction import taken


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
        lengths: Int64[Tensor, " B"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B n D"]]:
        """Convolve, and return the last n − 1 inputs for the next call.

        Args:
            x: the inputs, padding at the end.
            history: what an earlier call returned, or None at the start.
            lengths: how many positions of each row are no padding; None for all.
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
        extended = torch.cat([history.to(x.dtype), x], 1)
        sequence = None
        if starts is not None:
            sequence = torch.cat([starts.new_zeros(batch, past), starts], 1).cumsum(1)
        out = x * self.weight[0]
        for delta in range(1, self.width):
            seen = extended[:, past - delta : past - delta + length]
            if sequence is not None:
                same = sequence[:, past - delta : past - delta + length] == sequence[:, past:]
                seen = seen * same[..., None]
            out = out + seen * self.weight[delta]
        last = slice(length, length + past)
        if lengths is None:
            kept = extended[:, last]
            numbers = None if sequence is None else sequence[:, last]
        else:
            places = lengths[:, None] + torch.arange(past, device=x.device)
            kept = taken(extended, places)
            numbers = None if sequence is None else sequence.gather(1, places)
        if sequence is not None and numbers is not None:
            kept = kept * (numbers == sequence[:, -1:])[..., None]
        return out, kept
