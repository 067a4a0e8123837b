"""The table of uncertainty codes."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import check_number, check_whole
from prismlm.ops.uncertainty_feedback import check_levels, embed_codes


class UncertaintyEmbedding(nn.Module):
    """A vector for each code of uncertainty; zeros where there is no code.

    Source: PRISMA, "Core Components to Add". Fewer rows than codes, interpolated, are ours.

    Args:
        width: d.
        levels: how many codes there are.
        rows: K, rows of the table; None for one a code.
        deviation: standard deviation of the table at the start.

    Raises:
        InputError: fewer than two levels, rows that are not 2 to ``levels``, or a deviation that is
            no number from 0 on.
    """

    def __init__(
        self, width: int, levels: int = 65536, *, rows: int | None = None, deviation: float = 0.02
    ) -> None:
        super().__init__()
        self.levels = check_levels(levels)
        count = levels if rows is None else rows
        count = check_whole("the number of rows of the table", count, 2, levels)
        expected = "a number from 0 on"
        self.deviation = check_number(
            "the deviation of the table", deviation, expected, lambda spread: spread >= 0
        )
        self.weight = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the table from N(0, deviation²)."""
        nn.init.normal_(self.weight, std=self.deviation, generator=generator)

    def forward(self, codes: Int64[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """Return the vector of each code."""
        return embed_codes(codes, self.weight, self.levels)
