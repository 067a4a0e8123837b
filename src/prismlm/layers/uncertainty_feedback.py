"""The table of uncertainty codes."""

from __future__ import annotations

import math
from numbers import Integral

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError
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
        check_levels(levels)
        count: object = levels if rows is None else rows
        whole = not isinstance(count, bool) and isinstance(count, Integral)
        if not whole or not 2 <= int(count) <= levels:
            raise InputError(
                f"{count!r} rows for {levels} codes: expected a whole number from 2 to {levels}."
            )
        if not 0 <= deviation < math.inf:
            raise InputError(f"deviation {deviation} of the table: expected a number from 0 on.")
        self.levels, count = int(levels), int(count)
        self.deviation = deviation
        self.weight = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the table from N(0, deviation²)."""
        nn.init.normal_(self.weight, std=self.deviation, generator=generator)

    def forward(self, codes: Int64[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """Return the vector of each code."""
        return embed_codes(codes, self.weight, self.levels)
