"""The embedding table of uncertainty codes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from prismlm.errors import check_number, check_whole
from prismlm.ops.uncertainty_feedback import NO_CODE, embed_codes

ROWS = 64


class UncertaintyEmbedding(nn.Module):
    """A vector for each code from 0 to ``levels`` − 1, and zeros for NO_CODE.

    Codes between two rows are interpolated, and the table starts at zero. In the source it has one
    random row for each of 65,536 levels, so that neighbouring codes have independent vectors and
    rounding alone changes the vector by 130 %.

    Source: PRISMA, "Core Components to Add". Fewer rows than codes, interpolated, are ours.

    Args:
        width: d.
        levels: the number of codes.
        rows: K, the number of rows, at most one per code; None for one per code.
        deviation: initial standard deviation of the table.

    Attributes:
        seen: bool [levels], the codes that occurred in training.
    """

    seen: Tensor

    def __init__(
        self, width: int, levels: int = 65536, *, rows: int | None = ROWS, deviation: float = 0.0
    ) -> None:
        super().__init__()
        self.levels = check_whole("the number of levels of uncertainty", levels, 2)
        rows = levels if rows is None else check_whole("the number of rows of the table", rows, 2)
        expected = "a number from 0 on"
        self.deviation = check_number(
            "the deviation of the table", deviation, expected, lambda spread: spread >= 0
        )
        self.weight = nn.Parameter(torch.empty(min(rows, self.levels), width))
        self.register_buffer("seen", torch.zeros(self.levels, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the table from N(0, deviation²)."""
        nn.init.normal_(self.weight, std=self.deviation, generator=generator)

    def forward(self, codes: Int64[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """Return the vector of each code."""
        codes = codes.to(self.weight.device)
        if self.training and torch.is_grad_enabled():
            self.seen |= _occurring(codes, self.levels)
        return embed_codes(codes, self.weight, self.levels)


def _occurring(codes: Int64[Tensor, "B T"], levels: int) -> Bool[Tensor, " levels"]:
    """Return which codes occur, without a mask as an index, which would break a compiled graph."""
    indices = torch.where(codes == NO_CODE, levels, codes).flatten()
    occurring = torch.zeros(levels + 1, dtype=torch.bool, device=codes.device)
    return occurring.index_fill_(0, indices, True)[:levels]
