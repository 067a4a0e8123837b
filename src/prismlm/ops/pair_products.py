"""Dot products of selected pairs of vectors, without the full matrix or copies of rows."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)


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
    sparse: Any = torch.sparse
    zeros, shape = left.new_zeros(len(columns)), (len(left), len(right))
    pattern = torch.sparse_csr_tensor(  # pyright: ignore[reportUnknownMemberType]
        starts, columns, zeros, shape, check_invariants=False
    )
    products: Tensor = sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()
    return products
