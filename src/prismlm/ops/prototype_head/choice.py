"""Which pairs of states and prototypes are nearest: a low-precision product chooses among them.

What is chosen is computed again in float32. Scores in bf16 (float16 on a GPU) are within 1.5 ε of
the cosine, ε that dtype's epsilon, so where they choose, ``SPARE`` more candidates are ranked by
their float32 cosines. Pairs that are closer than the rounding may come in any order.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from prismlm.ops.pair_products import pair_products
from prismlm.ops.tiles import at_once

# Candidates beyond k where a low-precision product chooses.
SPARE = 8
# The score of what a mask leaves out: below every cosine.
ABSENT = -2.0
# Scores held at a time: 16 MiB on a CPU, 512 MiB on a GPU.
TILE_ELEMENTS, TILE_OF_GPU = 2**22, 2**27
# Rows of a CPU's bf16 product come in multiples of this.
LOW_ROWS = 64
# Rows whose common maximum is taken first.
ROW_GROUP = 16


@cache
def has_fast_product() -> bool:
    """Whether this CPU multiplies bf16 numbers itself; elsewhere a bf16 product is no faster."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def score_dtype(z: Tensor, prototypes: Tensor) -> torch.dtype:
    """Return the dtype of the product that chooses: as low as pays on the device."""
    if z.dtype == torch.float64:
        return z.dtype
    if z.is_cuda:
        return torch.float16
    large = len(z) >= 256 and z.shape[1] >= 64 and len(prototypes) >= 1024
    return torch.bfloat16 if large and has_fast_product() else torch.float32


def candidates(k: int, count: int, score: torch.dtype, z: Tensor) -> int:
    """Return how many of ``count`` prototypes are looked at again to choose k."""
    return min(count, k if score == z.dtype else k + SPARE)


def tile_rows(z: Tensor, count: int) -> int:
    """Return how many states are scored against ``count`` prototypes at a time."""
    if torch.compiler.is_exporting():
        return len(z)
    return max(1, at_once(z, TILE_ELEMENTS, TILE_OF_GPU) // count // ROW_GROUP) * ROW_GROUP


def product(states: Float[Tensor, "N d"], bank: Float[Tensor, "K d"]) -> Float[Tensor, "N K"]:
    """Return the scores of states, both in the dtype that chooses."""
    rows = whole_rows(states) if states.dtype == torch.bfloat16 else states
    return (rows @ bank.T)[: len(states)]


def whole_rows(low: Float[Tensor, "R d"]) -> Float[Tensor, "S d"]:
    """Return rows filled up with zeros to a multiple of ``LOW_ROWS``.

    A bf16 product on a CPU is compiled for its number of rows, a megabyte for each number, and the
    code of a thousand such products is kept.
    """
    missing = -len(low) % LOW_ROWS
    return torch.cat([low, low.new_zeros(missing, low.shape[1])]) if missing else low


def largest(
    scores: Float[Tensor, "R K"], count: int
) -> tuple[Float[Tensor, "R m"], Int64[Tensor, "R m"]]:
    """Return the ``count`` largest values of every row, descending, and their columns.

    Columns j, j + G, j + 2G … form group j. The m largest values lie in the m groups with the
    largest maxima, so that two short top-k's find what one over the whole row would.
    """
    rows, width = scores.shape
    size = 1  # g minimises width/g + count·g, the columns looked at
    while width // (2 * size) >= count and width / (2 * size) > size * count:
        size *= 2
    if size == 1:
        values, columns = scores.topk(count, dim=1)
        return values, columns
    groups = width // size
    grouped = scores[:, : size * groups].reshape(rows, size, groups)
    leading = grouped.amax(1).topk(count, dim=1, sorted=False).indices
    steps = torch.arange(0, size * groups, groups, device=scores.device)
    columns = (leading[:, :, None] + steps).flatten(1)
    if size * groups < width:
        tail = torch.arange(size * groups, width, device=scores.device)
        columns = torch.cat([columns, tail.expand(rows, -1)], dim=1)
    values, place = scores.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, place)


def column_best(scores: Float[Tensor, "R K"]) -> tuple[Float[Tensor, " K"], Int64[Tensor, " K"]]:
    """Return the largest score of every column and its row."""
    if scores.device.type != "cpu" or len(scores) % ROW_GROUP:
        best, row = scores.max(0)
        return best, row
    # A CPU is slow at indices down columns: a group's common maximum first.
    grouped = scores.view(-1, ROW_GROUP, scores.shape[1])
    best, group = grouped.amax(1).max(0)
    inside = grouped[group, :, torch.arange(len(group))].argmax(1)
    return best, group * ROW_GROUP + inside


def cosines_of(
    unit_z: Float[Tensor, "S d"],
    unit_p: Float[Tensor, "K d"],
    indices: Int64[Tensor, "N m"],
    rows: Int64[Tensor, " N"] | None = None,
) -> Float[Tensor, "N m"]:
    """Return the products of every state with its own m prototypes, no pair twice.

    Args:
        unit_z: states; all N of them unless ``rows`` says which.
        unit_p: prototypes.
        indices: of the prototypes.
        rows: of the states, ascending.
    """
    n, m = indices.shape
    if unit_z.device.type == "cpu" and not torch.compiler.is_compiling():
        starts = torch.arange(0, n * m + 1, m)
        if rows is not None:
            starts = m * torch.searchsorted(rows, torch.arange(len(unit_z) + 1))
        return pair_products(starts, indices.flatten(), unit_z, unit_p).view(n, m)
    step = at_once(unit_z, TILE_ELEMENTS, TILE_OF_GPU) // (m * unit_z.shape[1]) + 1
    of = torch.split(unit_z, step) if rows is None else (unit_z[r] for r in torch.split(rows, step))
    parts = zip(of, torch.split(indices, step), strict=True)
    return torch.cat([(unit_p[own] @ z[:, :, None]).squeeze(2) for z, own in parts])


def search(
    unit_z: Float[Tensor, "N d"],
    unit_p: Float[Tensor, "K d"],
    k: int,
    mask: Bool[Tensor, " N"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return indices and cosines [N, k], and each prototype's nearest state and cosine [K]."""
    low = score_dtype(unit_z, unit_p)
    low_z, low_p = unit_z.to(low), unit_p.to(low)
    many, step = candidates(k, len(unit_p), low, unit_z), tile_rows(unit_z, len(unit_p))
    columns: list[Tensor] = []
    best: list[Tensor] = []
    states: list[Tensor] = []
    for start in range(0, len(unit_z), step):
        tile = slice(start, start + step)
        scores = product(low_z[tile], low_p)
        columns.append(largest(scores, many)[1])
        value, row = column_best(scores if mask is None else masked(scores, mask[tile]))
        best.append(value)
        states.append(row + start)
    point = states[0]
    if len(states) > 1:
        point = torch.stack(states).gather(0, torch.stack(best).argmax(0, keepdim=True))[0]
    chosen = torch.cat(columns)
    cosines, order = cosines_of(unit_z, unit_p, chosen).topk(k, dim=1)
    return chosen.gather(1, order), cosines, point, (unit_z[point] * unit_p).sum(1)


def window_best(
    scores: Float[Tensor, "b t K"], lowest: Float[Tensor, " K"]
) -> tuple[Int64[Tensor, " e"], Int64[Tensor, " e"], Int64[Tensor, " e"]]:
    """Return window, position and prototype of windows' largest scores that reach ``lowest``."""
    length = scores.shape[1]
    size = ROW_GROUP if length % ROW_GROUP == 0 else 1
    grouped = scores.view(len(scores), length // size, size, -1)
    maxima = grouped.amax(2)
    window, prototype = (maxima.amax(1) >= lowest).nonzero(as_tuple=True)
    group = maxima[window, :, prototype].argmax(1)
    inside = grouped[window, group, :, prototype].argmax(1)
    return window, group * size + inside, prototype


def slack(score: torch.dtype, width: int) -> float:
    """Return by how much a score may be below the cosine in float32."""
    rounding = (width + 8) * torch.finfo(torch.float32).eps
    return rounding + (1.5 * torch.finfo(score).eps if score.itemsize == 2 else 0.0)


def masked(scores: Float[Tensor, "R K"], keep: Bool[Tensor, " R"]) -> Float[Tensor, "R K"]:
    """Return scores in which rows that are not to be kept are below every cosine."""
    return scores.masked_fill(~keep[:, None], ABSENT)
