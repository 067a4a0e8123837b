"""Which pairs of states and prototypes are the nearest: a low-precision product chooses among them.

What is chosen is computed again in float32, so that a pair's cosine depends neither on the product
nor on the other pairs. Scores in bf16 (float16 on a GPU) are within 1.5 ε of it, ε that dtype's
epsilon: where they choose, some spare candidates are ranked again by their float32 cosines. Pairs
that are closer than the rounding may come in any order.
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
# Scores held at a time on a CPU: 16 MiB.
TILE_ELEMENTS = 2**22
# Rows of a CPU's bf16 product come in multiples of this.
LOW_ROWS = 64
# Rows whose common maximum is taken before they are told apart.
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
    """Return how many prototypes of each state are looked at again for k of ``count``."""
    return min(count, k if score == z.dtype else k + SPARE)


def tile_rows(z: Tensor, count: int) -> int:
    """Return how many states are scored against ``count`` prototypes at a time."""
    if torch.compiler.is_exporting():
        return len(z)
    return max(ROW_GROUP, at_once(z, TILE_ELEMENTS, 2**27) // count // ROW_GROUP * ROW_GROUP)


def product(states: Float[Tensor, "N d"], bank: Float[Tensor, "K d"]) -> Float[Tensor, "N K"]:
    """Return the scores of states, both in the dtype that chooses."""
    rows = whole_rows(states) if states.dtype == torch.bfloat16 else states
    return (rows @ bank.T)[: len(states)]


def whole_rows(low: Float[Tensor, "R d"]) -> Float[Tensor, "S d"]:
    """Return rows filled up with zeros to a multiple of ``LOW_ROWS``.

    A bf16 product on a CPU is compiled for its number of rows, and the code of a thousand such
    products is kept: a megabyte for each number.
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
    size = _group_size(width, count)
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


def _group_size(width: int, count: int) -> int:
    """Return the power of two g that makes width/g + count·g, the columns looked at, smallest."""
    size = 1
    while width // (2 * size) >= count and width / (2 * size) + 2 * size * count < (
        width / size + size * count
    ):
        size *= 2
    return size


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
    unit_z: Float[Tensor, "N d"], unit_p: Float[Tensor, "K d"], indices: Int64[Tensor, "N m"]
) -> Float[Tensor, "N m"]:
    """Return the cosines of every state with its own m prototypes, no prototype twice."""
    n, m = indices.shape
    if unit_z.device.type == "cpu" and not torch.compiler.is_compiling():
        starts = torch.arange(0, n * m + 1, m)
        return pair_products(starts, indices.flatten(), unit_z, unit_p).view(n, m)
    rows = at_once(unit_z, TILE_ELEMENTS, 2**27) // (m * unit_z.shape[1]) + 1
    parts = zip(torch.split(unit_z, rows), torch.split(indices, rows), strict=True)
    return torch.cat([(unit_p[own] @ z[:, :, None]).squeeze(2) for z, own in parts])


def cosines_of_pairs(
    unit_z: Float[Tensor, "N d"],
    unit_p: Float[Tensor, "K d"],
    row: Int64[Tensor, " e"],
    column: Int64[Tensor, " e"],
) -> Float[Tensor, " e"]:
    """Return the cosines of listed pairs, rows ascending and no pair twice."""
    if unit_z.device.type == "cpu":
        starts = torch.searchsorted(row, torch.arange(len(unit_z) + 1))
        return pair_products(starts, column, unit_z, unit_p)
    step = at_once(unit_z, TILE_ELEMENTS, 2**27) // unit_z.shape[1]
    parts = zip(torch.split(row, step), torch.split(column, step), strict=True)
    return torch.cat([row.new_empty(0, dtype=unit_z.dtype)]
                     + [(unit_z[r] * unit_p[c]).sum(1) for r, c in parts])  # fmt: skip


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


def masked(scores: Float[Tensor, "R K"], keep: Bool[Tensor, " R"] | None) -> Float[Tensor, "R K"]:
    """Return scores in which rows that are not to be kept are below every cosine."""
    return scores if keep is None else scores.masked_fill(~keep[:, None], ABSENT)
