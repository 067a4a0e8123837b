"""The pass over all scores as one Triton kernel: no score leaves the chip but those that are kept.

A program takes a block of states and goes over all prototypes. It keeps the best scores of each
state in registers and takes a tile's maxima out of it only while one of them beats the worst score
kept; that is k·ln(K/k) times or so per state in all. Each block also writes the best and the
second-best score of every prototype: 3·N·K/BLOCK_STATES numbers, compared afterwards in a fixed
order. Near-ties are settled by ``exact.settle``, as for every other form.
"""

# Triton is not installed everywhere, and its language has no types.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prismlm.ops.prototype_head.exact import ABSENT, Candidates, margin
from prismlm.ops.prototype_head.routing import inverse_norms

BLOCK_STATES = 64
BLOCK_PROTOTYPES = 128
BLOCK_WIDTH = 32
# More kept scores per state than this do not stay in registers.
MAX_SPREAD = 64


def supports(z: Tensor, spread: int) -> bool:
    """Say whether the kernel takes such states: any but float64, and few enough per state."""
    return z.dtype != torch.float64 and spread <= MAX_SPREAD


def scan(z: Tensor, prototypes: Tensor, spread: int, mask: Tensor | None) -> Candidates:
    """Pass over all scores. bf16 and fp16 products are summed in float32 of those inputs."""
    if z.dtype != prototypes.dtype:
        z, prototypes = z.float(), prototypes.float()
    z, prototypes = z.contiguous(), prototypes.contiguous()
    n, (count, width) = z.shape[0], prototypes.shape
    keep = z.new_ones(n, dtype=torch.int8) if mask is None else mask.to(torch.int8)
    slots = max(16, triton.next_power_of_2(spread))
    blocks = triton.cdiv(n, BLOCK_STATES)
    values = z.new_empty(n, slots, dtype=torch.float32)
    indices = z.new_empty(n, slots, dtype=torch.int32)
    best = z.new_empty(max(blocks, 1), count, dtype=torch.float32)
    second = torch.full_like(best, ABSENT)
    state = torch.full_like(best, -1, dtype=torch.int32)
    if blocks:
        _scan_block[(blocks,)](
            z,
            prototypes,
            inverse_norms(z.float()),
            inverse_norms(prototypes.float()),
            keep,
            values,
            indices,
            best,
            second,
            state,
            n,
            count,
            width,
            ABSENT,
            BLOCK_STATES,
            BLOCK_PROTOTYPES,
            BLOCK_WIDTH,
            slots,
            num_warps=8,  # fewer spill
        )
    else:
        best.fill_(ABSENT)
    values, order = values.topk(spread, dim=1)
    top, block = best.max(0)
    near = top - margin(width, torch.float32)
    contested = (best >= near).sum(0) + (second >= near).sum(0) > 1
    chosen = state.gather(0, block[None])[0].long().masked_fill_(top == ABSENT, -1)
    return Candidates(values, indices.gather(1, order).long(), top, chosen, contested)


@triton.jit
def _products(
    z,
    prototypes,
    rows,
    row_in,
    columns,
    column_in,
    width,
    block_states: tl.constexpr,
    block_prototypes: tl.constexpr,
    block_width: tl.constexpr,
):
    """Return z @ prototypes.T of these rows and columns, in float32."""
    products = tl.zeros((block_states, block_prototypes), tl.float32)
    for start in range(0, width, block_width):
        d = start + tl.arange(0, block_width)
        a = tl.load(
            z + rows.to(tl.int64)[:, None] * width + d[None, :],
            mask=row_in[:, None] & (d < width)[None, :],
            other=0.0,
        )
        b = tl.load(
            prototypes + columns.to(tl.int64)[None, :] * width + d[:, None],
            mask=column_in[None, :] & (d < width)[:, None],
            other=0.0,
        )
        products = tl.dot(a, b, products, input_precision="ieee")
    return products


@triton.jit
def _keep_highest(kept, kept_index, scores, first, slot, offset):
    """Return each row's highest scores of those kept and those new, and their columns."""
    high, at = tl.max(scores, axis=1, return_indices=True)
    low, worst = tl.min(kept, axis=1, return_indices=True)
    while tl.max((high > low).to(tl.int32), axis=0) > 0:
        better = (high > low)[:, None]
        write = (slot[None, :] == worst[:, None]) & better
        kept = tl.where(write, high[:, None], kept)
        kept_index = tl.where(write, (first + at)[:, None], kept_index)
        scores = tl.where((offset[None, :] == at[:, None]) & better, float("-inf"), scores)
        high, at = tl.max(scores, axis=1, return_indices=True)
        low, worst = tl.min(kept, axis=1, return_indices=True)
    return kept, kept_index


@triton.jit
def _scan_block(
    z,
    prototypes,
    inverse_z,
    inverse_p,
    keep,
    values,
    indices,
    best,
    second,
    state,
    n,
    count,
    width,
    absent: tl.constexpr,
    block_states: tl.constexpr,
    block_prototypes: tl.constexpr,
    block_width: tl.constexpr,
    slots: tl.constexpr,
):
    block = tl.program_id(0)
    local = tl.arange(0, block_states)
    rows = block * block_states + local
    row_in = rows < n
    kept_row = tl.load(keep + rows, mask=row_in, other=0) != 0
    scale_z = tl.load(inverse_z + rows, mask=row_in, other=0.0)
    slot = tl.arange(0, slots)
    kept = tl.full((block_states, slots), float("-inf"), tl.float32)
    kept_index = tl.zeros((block_states, slots), tl.int32)
    for first in range(0, count, block_prototypes):
        offset = tl.arange(0, block_prototypes)
        columns = first + offset
        column_in = columns < count
        scores = _products(
            z, prototypes, rows, row_in, columns, column_in, width,
            block_states, block_prototypes, block_width,
        )  # fmt: skip
        scale_p = tl.load(inverse_p + columns, mask=column_in, other=0.0)
        scores = scores * scale_z[:, None] * scale_p[None, :]

        of_column = tl.where(kept_row[:, None], scores, absent)
        top, place = tl.max(of_column, axis=0, return_indices=True)
        rest = tl.where(local[:, None] == place[None, :], absent, of_column)
        out = block.to(tl.int64) * count + columns
        tl.store(best + out, top, mask=column_in)
        tl.store(second + out, tl.max(rest, axis=0), mask=column_in)
        tl.store(state + out, block * block_states + place, mask=column_in)

        scores = tl.where(column_in[None, :], scores, float("-inf"))
        kept, kept_index = _keep_highest(kept, kept_index, scores, first, slot, offset)
    out = rows.to(tl.int64)[:, None] * slots + slot[None, :]
    tl.store(values + out, kept, mask=row_in[:, None])
    tl.store(indices + out, kept_index, mask=row_in[:, None])
