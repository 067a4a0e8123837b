"""Signal/noise attention as one call of PyTorch's own attention kernel."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.signal_noise_attention.arguments import check_arguments
from prismlm.ops.signal_noise_attention.rotary import rotate


def attend(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    noise_weight: float | Tensor,
    *,
    signal_frequencies: Float[Tensor, " half"],
    noise_frequencies: Float[Tensor, " half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T p"]:
    """Attend with heads whose queries, keys and values are one vector u, in two groups.

        S_h,i =  Σ_j softmax_j(scale · (R_i u_i)·(R_j u_j)) u_j   over j ≤ i, signal heads
        N_h,i = −λ times the same with the noise heads' u and rotation

    Only queries and keys are rotated, so an unrotated u per head is all that a cache has to hold.
    The caller multiplies by Uᵀ and η: Z ← Z + η Σ_h out_h U_hᵀ.

    Source: Prism, Eq. 6 and 7, with the rotations of Eq. 12.

    Args:
        u_signal: Z U_s of every position seen, the earlier ones first.
        u_noise: Z U_n, likewise.
        noise_weight: λ, from 0 to 1; of a tensor only the shape is checked, not the value.
        signal_frequencies: ω of the signal heads, in radians a position.
        noise_frequencies: ω of the noise heads.
        positions: of what was seen; None for 0, 1, …
        mask: which position sees which; None for all up to itself.
        queries: T, how many of the last positions attend; None for all.
        scale: of scores; None for 1/√p. Eq. 6 has 1/√d.

    Returns:
        The signal heads and then the noise heads, these times −λ: G = 2H.

    Raises:
        InputError: shapes that do not fit together, or a number λ outside of [0, 1].
    """
    rotations = (signal_frequencies, noise_frequencies)
    check_arguments(u_signal, u_noise, noise_weight, rotations, positions, mask, queries)
    seen = u_signal.shape[2]
    asked = seen if queries is None else queries
    place = torch.arange(seen, device=u_signal.device)[None] if positions is None else positions
    values, keys = values_and_keys(u_signal, u_noise, place, rotations)
    causal = False
    if mask is None and asked > 1:
        if asked == seen:
            # Not the comparison itself, which is no bool where sizes are compiled as symbols.
            causal = True
        else:
            # PyTorch aligns its own causal mask with the first key, not the last.
            ends = torch.arange(seen - asked, seen, device=keys.device)
            mask = torch.arange(seen, device=keys.device) <= ends[:, None]
    heads = F.scaled_dot_product_attention(
        keys[:, :, seen - asked :], keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    weights = heads.new_ones(heads.shape[1])
    weights[u_signal.shape[1] :] = -1.0 * noise_weight
    return heads * weights[:, None, None]


def values_and_keys(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    positions: Int64[Tensor, "#B S"],
    rotations: tuple[Float[Tensor, " half"], Float[Tensor, " half"]],
) -> tuple[Float[Tensor, "B G S p"], Float[Tensor, "B G S p"]]:
    """Return u of all heads, signal first, as it is and rotated by each group's frequencies."""
    values = torch.cat([u_signal, u_noise], 1)
    batch, heads, seen, size = u_signal.shape
    groups = values.view(batch, 2, heads, seen, size)
    own = torch.stack(rotations)[:, None]
    return values, rotate(groups, positions[:, None, None], own).flatten(1, 2)
