"""Routing a tile of states at a time: no N×K matrix in the forward or the backward pass."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.ops.prototype_head.choice import (
    ABSENT,
    candidates,
    column_best,
    cosines_of,
    cosines_of_pairs,
    largest,
    masked,
    product,
    score_dtype,
    slack,
    tile_rows,
    window_best,
)
from prismlm.ops.prototype_head.routing import (
    Nearest,
    Routing,
    at_least_float32,
    check_arguments,
    inverse_norms,
)
from prismlm.ops.prototype_head.sparse import RowGradient, SelectedCosines, gather_sum

# Where few states are read, a product goes faster with the many rows on the left.
FEW_STATES = 8


def route(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    mask: Bool[Tensor, " N"] | None = None,
) -> Routing:
    """Route every state to its k nearest prototypes (PRISM, "Positive similarity scoring").

    c_ni = cos(z_n, p_i), α_ni = ReLU(scale · c_ni) for the k largest c_ni, in descending order. A
    low-precision product may choose them; cosines, activations and gradients are float32 (float64
    for float64 input) and touch the N·k + K chosen pairs only. No shape depends on the data, and
    nothing waits for the device.

    Args:
        z: hidden states.
        prototypes: the bank P, any norms; a zero row has cosine 0 to everything.
        k: prototypes per token.
        scale: τ > 0, a number or a scalar tensor.
        mask: False leaves a state out of ``nearest_point``.

    Raises:
        InputError: k > K, widths that differ, or a mask of another shape or dtype.
    """
    check_arguments(z, prototypes, k, mask)
    z, prototypes = at_least_float32(z), at_least_float32(prototypes)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        inverse = inverse_norms(z), inverse_norms(prototypes)
        found = _search(z * inverse[0], prototypes * inverse[1], k, mask)
    cosines, point_cosine = cast(
        "tuple[Tensor, Tensor]",
        SelectedCosines.apply(z, prototypes, *found, *inverse),  # pyright: ignore[reportUnknownMemberType]
    )
    activations = torch.relu(scale * cosines)
    return Routing(found[0], cosines, activations, cosines[:, 0], found[2], point_cosine)


def _search(
    unit_z: Tensor, unit_p: Tensor, k: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indices and cosines [N, k], and nearest state and cosine [K] of each prototype."""
    if not len(unit_z):
        none = unit_z.new_empty(0, k)
        nobody = torch.full((len(unit_p),), -1, device=unit_z.device)
        return none.long(), none, nobody, nobody.to(unit_z.dtype)
    low = score_dtype(unit_z, unit_p)
    low_z, low_p = unit_z.to(low), unit_p.to(low)
    many, step = candidates(k, len(unit_p), low, unit_z), tile_rows(unit_z, len(unit_p))
    columns: list[Tensor] = []
    best = low_p.new_full((len(unit_p),), ABSENT)
    state = torch.full_like(best, -1, dtype=torch.long)
    for start in range(0, len(unit_z), step):
        tile = slice(start, start + step)
        scores = product(low_z[tile], low_p)
        columns.append(largest(scores, many)[1])
        value, row = column_best(masked(scores, None if mask is None else mask[tile]))
        state = torch.where(value > best, row + start, state)
        best = torch.maximum(best, value)
    chosen = torch.cat(columns)
    cosines, order = cosines_of(unit_z, unit_p, chosen).topk(k, dim=1)
    point_cosine = (unit_z[state.clamp_min(0)] * unit_p).sum(1)
    point_cosine = torch.where(state >= 0, point_cosine, -torch.ones_like(point_cosine))
    return chosen.gather(1, order), cosines, state, point_cosine


@torch.no_grad()
def nearest(
    z: Float[Tensor, "N d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    scale: float | Tensor,
    inverse: Float[Tensor, "K 1"] | None = None,
) -> Nearest:
    """Return what :func:`route` does of states alone, from a float32 product.

    It writes no normalised copy of the prototypes, which for one state takes as long as its scores.
    ``inverse`` are their :func:`inverse_norms`, where they are known.

    Raises:
        InputError: k > K, or widths that differ.
    """
    check_arguments(z, prototypes, k)
    z, prototypes = at_least_float32(z), at_least_float32(prototypes)
    inverse = inverse_norms(prototypes) if inverse is None else inverse.to(z.dtype)
    parts = [(z.new_empty(0, k), z.new_empty(0, k, dtype=torch.long))]
    with torch.autocast(z.device.type, enabled=False):
        for states in torch.split(z, tile_rows(z, len(prototypes))):
            unit = states * inverse_norms(states)
            parts.append(largest(products(unit, prototypes).mul_(inverse.T), k))
    cosines, indices = (torch.cat(column) for column in zip(*parts, strict=True))
    return Nearest(indices, cosines, torch.relu(scale * cosines))


def products(
    states: Float[Tensor, "N d"], prototypes: Float[Tensor, "K d"]
) -> Float[Tensor, "N K"]:
    """Return Z Pᵀ; a product of few rows with many columns takes up to three times as long."""
    few = len(states) <= FEW_STATES
    return (prototypes @ states.T).T.contiguous() if few else states @ prototypes.T


def reconstruct(routing: Routing, prototypes: Float[Tensor, "K d"]) -> Float[Tensor, "N d"]:
    """Return ẑ_n = Σ_i α_ni p_i without gathering [N, k, d] rows."""
    weights = routing.activations
    rows = prototypes.to(weights.dtype)
    sums = gather_sum(routing.indices, weights, rows.detach())
    return cast(
        "Tensor",
        RowGradient.apply(sums, rows, weights.detach(), routing.indices),  # pyright: ignore[reportUnknownMemberType]
    )


class WindowScan(NamedTuple):
    """Routing of the N owned positions, and the positions that windows enter for a prototype.

    Attributes:
        indices: the nearest prototypes of every owned position, in the order of ``owned``.
        cosines: to those.
        window: which window a candidate comes from.
        offset: its position in the window.
        prototype: what it is a candidate for.
        cosine: to that.
    """

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    window: Int64[Tensor, " M"]
    offset: Int64[Tensor, " M"]
    prototype: Int64[Tensor, " M"]
    cosine: Float[Tensor, " M"]


@torch.no_grad()
def scan_windows(
    z: Float[Tensor, "B T d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    owned: Bool[Tensor, "B T"],
    threshold: Float[Tensor, " K"] | None = None,
) -> WindowScan:
    """Route owned positions and find the best of each window that reach a prototype's threshold.

    What indexing needs from one product: for every window b and prototype i, the owned t with the
    largest cos(z_bt, p_i), where that is at least threshold_i. A long window that is read in pieces
    may give one for each; the better of them is what one piece would give. The threshold leaves
    candidates out and changes no bit of the others, nor of the routing.

    Args:
        z: hidden states of windows.
        prototypes: the bank.
        k: prototypes per token.
        owned: the positions to look at.
        threshold: what is not worth keeping; None keeps the best of every window.

    Raises:
        InputError: shapes that do not fit, or k > K.
    """
    if z.ndim != 3 or owned.shape != z.shape[:2]:
        raise InputError(
            f"scan_windows expects z [B, T, d] and owned [B, T], got {list(z.shape)} "
            f"and {list(owned.shape)}."
        )
    flat = at_least_float32(z).flatten(0, 1)
    check_arguments(flat, prototypes, k)
    if not owned.any():
        return _nothing(flat, k)
    prototypes = at_least_float32(prototypes)
    if threshold is None:
        threshold = prototypes.new_full((len(prototypes),), ABSENT)
    with torch.autocast(z.device.type, enabled=False):
        unit_z, unit_p = flat * inverse_norms(flat), prototypes * inverse_norms(prototypes)
        low = score_dtype(flat, prototypes)
        lowest = (threshold - slack(low, z.shape[2])).clamp_min(ABSENT / 2)
        many = candidates(k, len(prototypes), low, flat)
        found = _scan(unit_z.to(low).view(z.shape), unit_p.to(low), many, owned, lowest)
        chosen, row, prototype = found
        own = unit_z[owned.flatten()]
        cosines, order = cosines_of(own, unit_p, chosen).topk(k, dim=1)
        cosine = cosines_of_pairs(unit_z, unit_p, row, prototype)
    kept = cosine >= threshold[prototype]
    row, length = row[kept], z.shape[1]
    indices = chosen.gather(1, order)
    return WindowScan(indices, cosines, row // length, row % length, prototype[kept], cosine[kept])


def _scan(
    z: Tensor, bank: Tensor, many: int, owned: Tensor, lowest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return candidates [N, many] of owned positions, and row and prototype of windows' best."""
    length, rows = z.shape[1], tile_rows(z, len(bank))
    windows, step = max(1, rows // length), min(rows, length)
    columns: list[Tensor] = []
    best: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(z), windows):
        for start in range(0, length, step):
            part = slice(first, first + windows), slice(start, start + step)
            own = owned[part].flatten()
            scores = product(z[part].flatten(0, 1), bank)
            columns.append(largest(scores, many)[1][own])
            scores = masked(scores, own).view(*owned[part].shape, -1)
            window, offset, prototype = window_best(scores, lowest)
            best.append(((first + window) * length + start + offset, prototype))
    row, prototype = (torch.cat(part) for part in zip(*best, strict=True))
    row, order = row.sort(stable=True)
    return torch.cat(columns), row, prototype[order]


def _nothing(flat: Tensor, k: int) -> WindowScan:
    none, empty = flat.new_empty(0), torch.empty(0, dtype=torch.long, device=flat.device)
    return WindowScan(empty.view(0, k), none.view(0, k), empty, empty, empty, none)
