"""How hidden states of positions are stored: one byte per dimension, or product quantisation.

In int8, a unit state is scale · code / 127, with its own scale. Product quantisation (Jégou et al.
2011) splits a state into parts of four dimensions (``pq``), or twelve (``pq12``, for the demo), and
stores the nearest of 256 centers of each, learned by faiss from a sample of the corpus before it is
read. ``pq`` takes a quarter of the size; its cosines are off by one or two hundredths.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from prismlm.errors import InputError, check_choice
from prismlm.lens import layout

CodeName = Literal["int8", "pq", "pq12"]
# Dimensions of a part, and centers of each.
PARTS = {"pq": 4, "pq12": 12}
CENTRES = 256
# Positions that the centers are learned from: the most that faiss uses.
SAMPLE = 256 * CENTRES
# States multiplied with all centers at once: enough to amortise a call, few enough for the cache.
STATES_AT_ONCE = 64


class Int8Codes:
    """A byte for each dimension and a scale for each state; ``fields`` are those of a record."""

    def __init__(self, width: int) -> None:
        self.fields: list[tuple[Any, ...]] = [("scale", "<f2"), ("code", "i1", (width,))]

    def states(self, records: np.ndarray) -> Tensor:
        """Return scale · code / 127, of length 1 up to rounding: float32 [n, d]."""
        return torch.from_numpy(records["code"]).float() * self._factors(records)[:, None]

    def cosines(self, records: np.ndarray, states: Tensor, owner: np.ndarray) -> np.ndarray:
        """Return the cosine of each record with its owner among unit states, float32 [n].

        ``owner`` is int64 [n] and ascends.
        """
        products, codes = torch.empty(len(records)), torch.from_numpy(records["code"])
        bounds = np.searchsorted(owner, np.arange(len(states) + 1)).tolist()
        for state, (begin, end) in zip(states, pairwise(bounds), strict=True):
            if begin < end:
                products[begin:end] = codes[begin:end].float() @ state
        # There are fewer products to scale than codes.
        return (products * self._factors(records)).numpy()

    def put(self, states: np.ndarray, into: np.ndarray) -> None:
        """Encode unit states, float32 [n, d], into the fields of n records."""
        scales = np.abs(states).max(1).astype(np.float16)
        factor = np.divide(127, scales, out=np.zeros(len(scales), np.float32), where=scales > 0)
        into["scale"] = scales
        into["code"] = np.rint(states * factor[:, None]).clip(-127, 127)

    @staticmethod
    def _factors(records: np.ndarray) -> Tensor:
        return torch.from_numpy(records["scale"].astype(np.float32) / 127)


class ProductCodes:
    """The nearest center of each part of a state, zero-padded to whole parts."""

    def __init__(self, width: int, centres: np.ndarray) -> None:
        self.width, self.centres = width, centres
        parts, count, part = centres.shape
        self.fields: list[tuple[Any, ...]] = [("code", "u1", (parts,))]
        self._table, self._first = torch.from_numpy(centres), torch.arange(parts) * count
        inside = pad(torch.ones(width), (0, -width % part)).view(parts, 1, part)
        self._squares = (self._table * inside).square().sum(2).flatten()

    @classmethod
    def learn(cls, sample: np.ndarray, name: str = "pq") -> ProductCodes:
        """Learn centers from states, float32 [n, d], n ≥ 1; deterministic."""
        faiss, width, part = _faiss(), sample.shape[1], PARTS[name]
        parts = parts_of(width, name)
        # faiss needs as many states as centers: repeat a smaller sample.
        sample = np.resize(sample, (max(len(sample), CENTRES), width))
        quantiser = faiss.ProductQuantizer(part * parts, parts, 8)
        quantiser.cp.min_points_per_centroid = 1  # no warning for small corpora
        threads = faiss.omp_get_max_threads()
        # Sums depend on the number of threads.
        faiss.omp_set_num_threads(1)
        try:
            quantiser.train(_padded(sample, part))
        finally:
            faiss.omp_set_num_threads(threads)
        centres = faiss.vector_to_array(quantiser.centroids)
        return cls(width, centres.reshape(parts, CENTRES, part))

    def states(self, records: np.ndarray) -> Tensor:
        """Return the concatenated centers, normalised: float32 [n, d]."""
        centres = self._table.flatten(0, 1)[torch.from_numpy(records["code"]).long() + self._first]
        return normalize(centres.flatten(1)[:, : self.width], dim=-1)

    def cosines(self, records: np.ndarray, states: Tensor, owner: np.ndarray) -> np.ndarray:
        """As :meth:`Int8Codes.cosines`; products and squared lengths are sums over parts."""
        parts, count, part = self.centres.shape
        index = torch.from_numpy(records["code"]).long() + self._first
        lengths = self._squares[index].sum(1).sqrt_().clamp_min_(1e-12)
        products = torch.empty(len(records))
        padded = pad(states, (0, -self.width % part)).view(-1, parts, part)
        for first in range(0, len(states), STATES_AT_ONCE):
            some = slice(first, first + STATES_AT_ONCE)
            begin, end = np.searchsorted(owner, (some.start, some.stop))
            if begin < end:
                table = torch.einsum("qpd,pcd->qpc", padded[some], self._table).flatten()
                offset = torch.from_numpy(owner[begin:end] - first) * (parts * count)
                products[begin:end] = table[index[begin:end] + offset[:, None]].sum(1)
        return (products / lengths).numpy()

    @cached_property
    def _quantiser(self) -> Any:
        faiss, (parts, _, part) = _faiss(), self.centres.shape
        quantiser = faiss.ProductQuantizer(part * parts, parts, 8)
        faiss.copy_array_to_vector(self.centres.ravel(), quantiser.centroids)
        return quantiser

    def put(self, states: np.ndarray, into: np.ndarray) -> None:
        """As :meth:`Int8Codes.put`; each state is encoded by itself."""
        into["code"] = self._quantiser.compute_codes(_padded(states, self.centres.shape[2]))


Codes = Int8Codes | ProductCodes


def parts_of(width: int, name: str = "pq") -> int:
    """Return the number of parts of a state."""
    return -(-width // PARTS[name])


def learn_codes(directory: Path, name: str, states: np.ndarray) -> ProductCodes:
    """Learn the centers of product quantisation from states, and save them."""
    codes = ProductCodes.learn(states, name)
    np.save(directory / layout.CELL_CENTRES_FILE, codes.centres)
    return codes


def check_codes(name: str) -> CodeName:
    """Return the name of a code; InputError if it is unknown, or faiss is missing."""
    if name in PARTS:
        _faiss()
    else:
        check_choice("--codes", name, ("int8", "pq"))
    return cast("CodeName", name)


def open_codes(directory: Path | None, name: str, width: int) -> Codes:
    """Open the code of cells; without a directory, one that is as large and as fast."""
    if name == "int8":
        return Int8Codes(width)
    if directory is None:
        centres = np.zeros((parts_of(width, name), CENTRES, PARTS[name]), np.float32)
    else:
        centres = np.array(layout.open_array(directory / layout.CELL_CENTRES_FILE))
    return ProductCodes(width, centres)


def _padded(states: np.ndarray, part: int) -> np.ndarray:
    return np.ascontiguousarray(np.pad(states, ((0, 0), (0, -states.shape[1] % part))))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError(
            "--codes pq needs faiss, which is not installed: pip install 'prismlm[pq]', or "
            "use --codes int8."
        ) from error
    return faiss
