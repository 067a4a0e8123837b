"""Mamba 2's scan for a processor: what all heads share is multiplied once.

Transformers repeats B and C for every head where there is no kernel for a GPU. With one group, as
here, C Bᵀ is the same for all heads, and states are products with all heads side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mamba2 import modeling_mamba2

REPEATED: Any = modeling_mamba2.mamba2_chunk_scan
"""The scan of Transformers."""


@contextmanager
def shared_scans() -> Iterator[None]:
    """Have every Mamba 2 within add up its chunks by :func:`shared_scan`."""
    before = modeling_mamba2.mamba2_chunk_scan
    modeling_mamba2.mamba2_chunk_scan = shared_scan
    try:
        yield
    finally:
        modeling_mamba2.mamba2_chunk_scan = before


def shared_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """Return y_t = C_t S_t + D x_t, where S_t = exp(A Δ_t) S_{t−1} + Δ_t B_t x_tᵀ.

    Contract of Transformers' ``mamba2_chunk_scan``, which is called where groups are several.

    Args:
        hidden_states: x [b, T, h, p].
        dt: Δ [b, T, h], before its bias and softplus.
        A: [h], below 0.
        B: [b, T, 1, n].
        C: likewise.
        chunk_size: l at most.
        D: [h].
        dt_bias: [h].
        initial_states: S_0 [b, h, p, n]; None for 0.
        dt_softplus: whether Δ is the softplus.
        dt_limit: what Δ is clamped to.
        return_final_states: whether to return S_T too.
        more: what kernels read.

    Source: Dao and Gu, Transformers are SSMs, 2024, section 6.
    """
    length = hidden_states.shape[1]
    if B.shape[2] != 1:
        scanned = (hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states)
        return REPEATED(*scanned, dt_softplus, dt_limit, return_final_states, **more)
    # As many chunks as are asked for, of one size, so that none is mostly padding.
    size = math.ceil(length / math.ceil(length / chunk_size))
    dt = _steps(dt, dt_bias, dt_softplus, dt_limit)
    x = hidden_states.float()
    fed, log_decay, b, c = (
        _chunks(tensor, size)
        for tensor in (x * dt[..., None], A.float() * dt, B.float()[:, :, 0], C.float()[:, :, 0])
    )
    passed = log_decay.cumsum(2)
    # Within a chunk, [b, c, h, l, l].
    weights = (c @ b.mT)[:, :, None] * _decay_between(passed.transpose(2, 3))
    within = (weights @ fed.transpose(2, 3)).transpose(2, 3)
    ended = None
    if passed.shape[1] > 1 or initial_states is not None or return_final_states:
        carried, ended = _carried(fed, passed, b, c, initial_states)
        within = within + carried
    y = within.flatten(1, 2)[:, :length]
    y = y if D is None else y + D[:, None] * x
    return (y, ended) if return_final_states else y


def _carried(
    fed: Tensor, passed: Tensor, b: Tensor, c: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what chunks read of the states they begin with, and the last state [b, h, p, n]."""
    # What a chunk adds to the state, [b, c, n, h p], and the states that chunks begin with.
    kept = fed * (passed[:, :, -1:] - passed).exp()[..., None]
    added = (b.mT @ kept.flatten(3)).unflatten(3, fed.shape[3:])
    states = _states(added, passed[:, :, -1], initial)
    before = (c @ states[:, :-1].flatten(3)).unflatten(3, fed.shape[3:])
    return before * passed.exp()[..., None], states[:, -1].permute(0, 2, 3, 1)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).clamp(*limit).float()


def _chunks(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor [b, T, …] as [b, c, size, …], filled up with zeros."""
    missing = -tensor.shape[1] % size
    padded = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing))
    return padded.unflatten(1, (-1, size))


def _decay_between(passed: Tensor) -> Tensor:
    """Return exp(passed_i − passed_j) [..., l, l] where j ≤ i, and 0 elsewhere."""
    later = torch.ones(2 * passed.shape[-1:], dtype=torch.bool, device=passed.device).triu(1)
    return (passed[..., :, None] - passed[..., None, :]).masked_fill(later, -math.inf).exp()


def _states(added: Tensor, passed: Tensor, initial: Tensor | None) -> Tensor:
    """Return the state [b, c + 1, n, h, p] before each chunk, and after the last."""
    first = torch.zeros_like(added[:, :1])
    if initial is not None:
        first = initial.to(added.dtype).permute(0, 3, 1, 2)[:, None]
    # From after one chunk to before another, [b, h, c + 1, c + 1].
    decay = _decay_between(F.pad(passed, (0, 0, 1, 0)).cumsum(1).transpose(1, 2))
    return torch.einsum("bhiz,bznhp->binhp", decay, torch.cat([first, added], dim=1))
