"""The table of uncertainty codes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from prismlm.errors import check_number, check_whole
from prismlm.ops.uncertainty_feedback import NO_CODE, check_levels, embed_codes

ROWS = 64


class UncertaintyEmbedding(nn.Module):
    """A vector for each code of uncertainty; zeros where there is no code.

    Codes between two rows are interpolated, and the table starts at zero. With a row for each of
    65,536 levels, drawn, as the source has it, rounding alone changes the vector by 130 %:
    neighbouring codes have independent vectors.

    Source: PRISMA, "Core Components to Add". Fewer rows than codes, interpolated, are ours.

    Attributes:
        levels: how many codes there are.
        seen: bool [levels], which codes were fed while it trained.

    Args:
        width: d.
        levels: how many codes there are.
        rows: K, rows of the table, at most one a code; None for one a code.
        deviation: standard deviation of the table at the start.

    Raises:
        InputError: fewer than two levels or rows, or a deviation that is no number from 0 on.
    """

    seen: Tensor

    def __init__(
        self, width: int, levels: int = 65536, *, rows: int | None = ROWS, deviation: float = 0.0
    ) -> None:
        super().__init__()
        self.levels = check_levels(levels)
        asked = levels if rows is None else check_whole("the number of rows of the table", rows, 2)
        expected = "a number from 0 on"
        self.deviation = check_number(
            "the deviation of the table", deviation, expected, lambda spread: spread >= 0
        )
        self.weight = nn.Parameter(torch.empty(min(asked, self.levels), width))
        self.register_buffer("seen", torch.zeros(self.levels, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the table from N(0, deviation²)."""
        nn.init.normal_(self.weight, std=self.deviation, generator=generator)

    def forward(self, codes: Int64[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """Return the vector of each code."""
        codes = codes.to(self.weight.device)
        if self.training and torch.is_grad_enabled():
            self.seen |= _which_occur(codes, self.levels)
        return embed_codes(codes, self.weight, self.levels)


def _which_occur(codes: Int64[Tensor, "B T"], levels: int) -> Bool[Tensor, " levels"]:
    """Return which codes there are; in one graph, as indexing by a mask is not."""
    numbers = torch.where(codes == NO_CODE, levels, codes).flatten()
    found = torch.zeros(levels + 1, dtype=torch.bool, device=codes.device)
    return found.index_fill_(0, numbers, True)[:levels]
