"""How the hidden states of positions are stored: a byte per number, or product-quantised.

In int8 a unit state is scale · code / 127, with a scale of its own. Product quantisation (Jégou et
al. 2011) cuts a state into parts of four numbers (``pq``) and stores for each the nearest of 256
centres, which faiss learns from a sample of the positions: a quarter of the size, with cosines off
by a hundredth or two. ``pq12``, with parts of twelve, is that of the demo.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prismlm.errors import InputError, check_choice
from prismlm.lens import layout

CodeName = Literal["int8", "pq", "pq12"]
# Numbers of a part, and centres for each part.
PARTS = {"pq": 4, "pq12": 12}
CENTRES = 256
# Positions that centres are learned from: as many as faiss takes for 256 of them.
SAMPLE = 256 * CENTRES
# Products of states with centres formed at once: 64 MiB.
PRODUCTS_AT_ONCE = 2**24


class Int8Codes:
    """A byte for each number of a state, and a scale for each state; records have ``fields``."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.fields: list[tuple[Any, ...]] = [("scale", "<f2"), ("code", "i1", (width,))]

    def states(self, records: np.ndarray) -> Tensor:
        """Return scale · code / 127, of length 1 up to rounding: float32 [n, d]."""
        return torch.from_numpy(records["code"]).float() * self._factor(records)[:, None]

    def cosines(self, records: np.ndarray, states: Tensor, owner: np.ndarray) -> np.ndarray:
        """Return the cosine of each record to its owner among unit states, float32 [n].

        ``owner`` is int64 [n] and ascends.
        """
        products = torch.empty(len(records))
        bounds = np.searchsorted(owner, np.arange(len(states) + 1)).tolist()
        for state, (begin, end) in zip(states, pairwise(bounds), strict=True):
            if begin < end:
                codes = torch.from_numpy(records["code"][begin:end])
                products[begin:end] = codes.float() @ state
        # Scales are applied to products, of which there are fewer.
        return (products * self._factor(records)).numpy()

    def put(self, records: np.ndarray, into: np.ndarray) -> None:
        """Copy the codes of int8 records."""
        into["scale"], into["code"] = records["scale"], records["code"]

    @staticmethod
    def _factor(records: np.ndarray) -> Tensor:
        return torch.from_numpy(records["scale"].astype(np.float32) / 127)


class ProductCodes:
    """The nearest centre of each part of a state, which is padded with zeros to whole parts."""

    def __init__(self, width: int, centres: np.ndarray) -> None:
        self.width, self.centres = width, centres
        parts, _, part = centres.shape
        self.fields: list[tuple[Any, ...]] = [("code", "u1", (parts,))]
        self._table = torch.from_numpy(centres.reshape(parts * CENTRES, part))
        self._first = torch.arange(parts) * CENTRES
        seen = functional.pad(torch.ones(width), (0, -width % part)).view(parts, 1, part)
        self._squares = (torch.from_numpy(centres) * seen).square().sum(2).flatten()

    @classmethod
    def learn(cls, sample: np.ndarray, name: str = "pq") -> ProductCodes:
        """Learn centres from states, float32 [n, d], n ≥ 1; the same for the same states."""
        faiss, width = _faiss(), sample.shape[1]
        parts, part = parts_of(width, name), PARTS[name]
        # There must be a state for each centre; where there are fewer, they are repeated.
        sample = np.resize(sample, (max(len(sample), CENTRES), width))
        quantiser = faiss.ProductQuantizer(part * parts, parts, 8)
        # Without it faiss warns of fewer than 39 states a centre, which is what a small corpus has.
        quantiser.cp.min_points_per_centroid = 1
        threads = faiss.omp_get_max_threads()
        # Sums of several threads depend on how many there are.
        faiss.omp_set_num_threads(1)
        try:
            quantiser.train(_padded(sample, part))
        finally:
            faiss.omp_set_num_threads(threads)
        centres = faiss.vector_to_array(quantiser.centroids)
        return cls(width, centres.reshape(parts, CENTRES, part))

    def states(self, records: np.ndarray) -> Tensor:
        """Return the centres put together, at length 1: float32 [n, d]."""
        index = torch.from_numpy(records["code"]).long() + self._first
        return functional.normalize(self._table[index].flatten(1)[:, : self.width], dim=-1)

    def cosines(self, records: np.ndarray, states: Tensor, owner: np.ndarray) -> np.ndarray:
        """Return the cosine of each record to its owner among unit states, float32 [n].

        Products and squared lengths are sums over parts, so no state is put together.
        """
        parts, centres, part = self.centres.shape
        if not len(records):
            return np.empty(0, dtype=np.float32)
        states, owner = states[owner[0] : owner[-1] + 1], owner - owner[0]
        own = functional.pad(states, (0, -self.width % part)).view(-1, parts, part)
        index = torch.from_numpy(records["code"]).long() + self._first
        lengths = self._squares[index].sum(1).sqrt_().clamp_min_(1e-12)
        at_once, found = max(1, PRODUCTS_AT_ONCE // (parts * centres)), torch.empty(len(records))
        bounds = np.searchsorted(owner, np.arange(0, len(own) + at_once, at_once)).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            first = number * at_once
            some, offset = own[first : first + at_once], owner[begin:end] - first
            products = torch.einsum("qpd,pcd->qpc", some, self._table.view(parts, centres, part))
            index[begin:end] += torch.from_numpy(offset * parts * centres)[:, None]
            found[begin:end] = products.flatten()[index[begin:end]].sum(1)
        return found.div_(lengths).numpy()

    def put(self, records: np.ndarray, into: np.ndarray) -> None:
        """Find the nearest centres of the states of int8 records."""
        faiss = _faiss()
        parts, _, part = self.centres.shape
        quantiser = faiss.ProductQuantizer(part * parts, parts, 8)
        faiss.copy_array_to_vector(self.centres.ravel(), quantiser.centroids)
        states = Int8Codes(self.width).states(records).numpy()
        into["code"] = quantiser.compute_codes(_padded(states, part))


Codes = Int8Codes | ProductCodes


def quantise(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales, float16 [N], and int8 codes [N, d] of unit states: z ≈ scale · code / 127."""
    scales = np.abs(states).max(1).astype(np.float16)
    factor = np.divide(127, scales, out=np.zeros(len(scales), np.float32), where=scales > 0)
    return scales, np.rint(states * factor[:, None]).clip(-127, 127).astype(np.int8)


def parts_of(width: int, name: str = "pq") -> int:
    """Return into how many parts a state is cut."""
    return -(-width // PARTS[name])


def check_codes(name: str) -> CodeName:
    """Return the name of a code; InputError if there is no such code, or faiss is missing."""
    if name in PARTS:
        _faiss()
    else:
        check_choice("--codes", name, ("int8", "pq"))
    return cast("CodeName", name)


def open_codes(directory: Path, name: str, width: int) -> Codes:
    """Return the code that the cells of a lens have."""
    if name == "int8":
        return Int8Codes(width)
    return ProductCodes(width, np.array(layout.open_array(directory / layout.CELL_CENTRES_FILE)))


def _padded(states: np.ndarray, part: int) -> np.ndarray:
    return np.ascontiguousarray(np.pad(states, ((0, 0), (0, -states.shape[1] % part))))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError(
            "--codes pq needs faiss, which is not installed: pip install 'prismlm[pq]', or "
            "--codes int8."
        ) from error
    return faiss
