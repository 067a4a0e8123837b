"""Signal/noise attention as one call of PyTorch's own kernel, and the weights beside it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.ops.signal_noise_attention.rotary import rotate


def check_arguments(
    u_signal: Tensor,
    u_noise: Tensor,
    noise_weight: float | Tensor,
    rotations: tuple[Tensor, Tensor],
    positions: Tensor | None,
    mask: Tensor | None,
    queries: int | None,
) -> int:
    """Return how many positions attend; raise InputError for what does not fit together."""
    if u_signal.ndim != 4 or 0 in u_signal.shape or u_noise.shape != u_signal.shape:
        raise InputError(
            f"u_signal is {list(u_signal.shape)} and u_noise {list(u_noise.shape)}: expected "
            "[B, H, S, p] of both, at least one of each."
        )
    batch, _, seen, size = u_signal.shape
    for name, own in zip(("signal", "noise"), rotations, strict=True):
        if size % 2 or own.shape != (size // 2,):
            raise InputError(
                f"{name}_frequencies are {list(own.shape)}: heads of size {size} need one for "
                "each pair of dimensions, and an even size."
            )
    asked = seen if queries is None else queries
    if not 1 <= asked <= seen:
        raise InputError(f"queries is {queries}: expected 1 to {seen}, the positions seen.")
    if positions is not None and positions.shape != (batch, seen):
        raise InputError(f"positions are {list(positions.shape)}: expected {[batch, seen]}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, 1, asked, seen)):
        raise InputError(
            f"mask is {mask.dtype} {list(mask.shape)}: expected bool {[batch, 1, asked, seen]}."
        )
    # The value of a tensor is not looked at, which would wait for the device at every call: whoever
    # sets it checks it, as ``SignalNoiseModel.set_noise_weight`` does.
    if isinstance(noise_weight, Tensor):
        if noise_weight.numel() != 1:
            raise InputError(f"λ is {list(noise_weight.shape)}: expected one number.")
    elif not 0 <= noise_weight <= 1:
        raise InputError(f"λ is {noise_weight}: expected 0 to 1.")
    return asked


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
    asked = check_arguments(u_signal, u_noise, noise_weight, rotations, positions, mask, queries)
    values, keys = _values_and_keys(u_signal, u_noise, positions, rotations)
    seen, causal = keys.shape[2], False
    if mask is None and asked > 1:
        if asked == seen:
            # Not the comparison itself, which is no bool where sizes are compiled as symbols.
            causal = True
        else:
            # PyTorch aligns its own causal mask with the first key, not the last.
            mask = _up_to_each(seen, asked, keys.device)
    heads = F.scaled_dot_product_attention(
        keys[:, :, seen - asked :], keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    weights = heads.new_ones(heads.shape[1])
    weights[u_signal.shape[1] :] = -1.0 * noise_weight
    return heads * weights[:, None, None]


def _values_and_keys(
    u_signal: Tensor, u_noise: Tensor, positions: Tensor | None, rotations: tuple[Tensor, Tensor]
) -> tuple[Float[Tensor, "B G S p"], Float[Tensor, "B G S p"]]:
    """Return u of all heads, signal first, as it is and rotated by each group's frequencies."""
    groups = torch.stack([u_signal, u_noise], 1)
    if positions is None:
        positions = torch.arange(groups.shape[3], device=groups.device)[None]
    keys = rotate(groups, positions[:, None, None], torch.stack(rotations)[:, None])
    return groups.flatten(1, 2), keys.flatten(1, 2)


def _up_to_each(seen: int, asked: int, device: torch.device) -> Bool[Tensor, "T S"]:
    return torch.ones(asked, seen, dtype=torch.bool, device=device).tril(seen - asked)


def attention_weights(
    u_signal: Float[Tensor, "B H S p"],
    u_noise: Float[Tensor, "B H S p"],
    *,
    signal_frequencies: Float[Tensor, " half"],
    noise_frequencies: Float[Tensor, " half"],
    positions: Int64[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B 1 T S"] | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B G T S"]:
    """Return softmax_j(scale · (R_i u_i)·(R_j u_j)) over the positions j that i sees.

    What :func:`attend` weighs its values by, before λ: rows of a signal head and of a noise head
    sum to 1 alike. A position that sees nothing has a row of zeros.

    Held at once are the scores and the weights, twice what is returned, and the mask.

    Source: Prism, Eq. 6 and 7. Arguments as of :func:`attend`.

    Returns:
        Signal heads first, then noise heads: G = 2H.

    Raises:
        InputError: shapes that do not fit together.
    """
    rotations = (signal_frequencies, noise_frequencies)
    asked = check_arguments(u_signal, u_noise, 0.0, rotations, positions, mask, queries)
    seen, size = u_signal.shape[2:]
    _, keys = _values_and_keys(u_signal, u_noise, positions, rotations)
    hidden = ~(_up_to_each(seen, asked, keys.device) if mask is None else mask)
    scores = (keys[:, :, seen - asked :] * (size**-0.5 if scale is None else scale)) @ keys.mT
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    # For a position that sees nothing. The gradient of softmax needs what it returned.
    fill = weights.masked_fill if weights.requires_grad else weights.masked_fill_
    return fill(hidden, 0.0)
