"""Signal/noise attention by PyTorch's fused kernel, and its weights."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.ops.signal_noise_attention.rotary import rotate
from prismlm.ops.tensors import check_axes


def attend(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    noise_weight: float | Tensor,
    *,
    frequencies: Float[Tensor, "2 half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T p"]:
    """Attend with heads whose queries, keys and values are one vector u, in two groups.

        S_h,i =  Σ_j softmax_j(scale · (R_i u_i)·(R_j u_j)) u_j   over j ≤ i, signal heads
        N_h,i = −λ times the same with the noise heads' u and rotation

    Only queries and keys are rotated, so a cache needs one unrotated u per head. The caller
    multiplies by Uᵀ and η: Z ← Z + η Σ_h out_h U_hᵀ.

    Source: Prism, Eq. 6 and 7, with the rotations of Eq. 12.

    Args:
        u_signal: Z U_s of all S positions, in order.
        u_noise: Z U_n, likewise.
        noise_weight: λ, from 0 to 1.
        frequencies: ω of signal and noise heads, in radians per position.
        positions: of all S; None for 0, 1, …
        mask: which position sees which; None for causal.
        queries: T, the number of last positions that attend; None for all.
        scale: of scores; None for 1/√p. Eq. 6 has 1/√d.

    Returns:
        The signal heads, then the noise heads times −λ: G = 2H.
    """
    values, keys = _values_and_keys(u_signal, u_noise, positions, frequencies, mask)
    length, causal = keys.shape[2], False
    queries = length if queries is None else queries
    if mask is None and queries > 1:
        if queries == length:
            # Not ``causal = queries == length``, which is symbolic when compiled.
            causal = True
        else:
            # PyTorch aligns its own causal mask with the first key, not the last.
            mask = _causal_mask(length, queries, keys.device)
    heads = F.scaled_dot_product_attention(
        keys[:, :, length - queries :], keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    weights = heads.new_ones(heads.shape[1])
    weights[u_signal.shape[1] :] = -1.0 * noise_weight
    return heads * weights[:, None, None]


def _values_and_keys(
    u_signal: Tensor,
    u_noise: Tensor,
    positions: Tensor | None,
    frequencies: Tensor,
    mask: Tensor | None,
) -> tuple[Float[Tensor, "B G S p"], Float[Tensor, "B G S p"]]:
    """Return u of all heads, signal first, unrotated and rotated by each group's frequencies."""
    check_axes(
        u_signal=("B H S p", u_signal),
        pairs=("B H S two half", u_signal.reshape(*u_signal.shape[:-1], 2, -1)),
        u_noise=("B H S p", u_noise),
        frequencies=("group half", frequencies),
        positions=("B S", positions),
        mask=("B one T S", mask),
    )
    groups = torch.stack([u_signal, u_noise], 1)
    if positions is None:
        positions = torch.arange(groups.shape[3], device=groups.device)[None]
    keys = rotate(groups, positions[:, None, None], frequencies[:, None])
    return groups.flatten(1, 2), keys.flatten(1, 2)


def _causal_mask(length: int, queries: int, device: torch.device) -> Bool[Tensor, "T S"]:
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)


def attention_weights(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    *,
    frequencies: Float[Tensor, "2 half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T S"]:
    """Return the weights of :func:`attend` before λ: softmax_j(scale · (R_i u_i)·(R_j u_j)).

    Rows sum to 1 for signal and noise heads, and are zero where a position sees nothing. Arguments
    as for :func:`attend`; signal heads come first. Peak memory is twice the result, and the mask.
    """
    length, size = u_signal.shape[2:]
    queries = length if queries is None else queries
    _, keys = _values_and_keys(u_signal, u_noise, positions, frequencies, mask)
    hidden = ~(_causal_mask(length, queries, keys.device) if mask is None else mask)
    scores = (keys[:, :, length - queries :] * (size**-0.5 if scale is None else scale)) @ keys.mT
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    # For positions that see nothing; out of place if softmax's gradient needs its output.
    fill = weights.masked_fill if weights.requires_grad else weights.masked_fill_
    return fill(hidden, 0.0)
