"""The state of the prefix mean between calls."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

# The mass below which a channel is empty, near float32's smallest numbers.
EMPTY_BELOW = 1e-30


class PrefixState(NamedTuple):
    """The sums and mass that the next position i reads; float32 or float64.

    S_k = Σ_j β_k^(i−j) w_jk v_j and M_k = Σ_j β_k^(i−j) w_jk, v_j the D / G values of k's group.
    """

    sums: Float[Tensor, "B R width"]
    mass: Float[Tensor, "B R"]
