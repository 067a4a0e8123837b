"""Dot products of selected pairs of vectors, without the full matrix or copies of rows."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@cache
def _suppress_first_warning() -> None:
    """Make the first CSR tensor of the process, for which PyTorch warns that they are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _csr(torch.tensor([0, 1]), torch.tensor([0]), torch.zeros(1), (1, 1))


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(  # pyright: ignore[reportUnknownMemberType]
        starts, columns, values, shape, check_invariants=False
    )


def pair_products(
    starts: Int64[Tensor, " s"],
    columns: Int64[Tensor, " e"],
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
) -> Float[Tensor, " e"]:
    """Return left_n · right_m for the listed pairs; no sum depends on the other pairs.

    Args:
        starts: row n of ``left`` has the pairs from starts[n] to starts[n + 1]; s = n + 1.
        columns: the row of ``right`` in each pair, without duplicates. Neither is validated.
        left, right: float32 or float64 vectors.
    """
    _suppress_first_warning()
    sparse: Any = torch.sparse
    pattern = _csr(starts, columns, left.new_zeros(len(columns)), (len(left), len(right)))
    products: Tensor = sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()
    return products
