"""The cells of a lens: every indexed position by nearest prototype and next token.

Filters choose among the documents of these positions, by source, domain and licence.

A position stores its hidden state in a byte per dimension, or by product quantisation. In int8, a
unit state is scale · code / 127, with its own scale. Product quantisation (Jégou et al. 2011)
splits a state into parts of four dimensions (``pq``), or twelve (``pq12``, for the demo), and
stores the nearest of 256 centers of each, learned by faiss from a sample of the corpus before it is
read. ``pq`` takes a quarter of the size; its cosines are off by one or two hundredths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.corpus.tables import ParquetTable
from prismlm.errors import InputError, check_choice, suggest
from prismlm.lens import layout
from prismlm.lens.store import LensFiles, files_of

ROWS_AT_ONCE = 2**16
POSITION_TYPES, TOKEN_TYPES = {4: "<u4", 8: "<i8"}, {2: "<u2", 4: "<i4"}
# Positions of one range that are compared at most, in stretches that are contiguous on disk.
MOST_OF_A_RANGE = 512
STRETCH = 32
RECORDS_AT_ONCE = 2**15
CACHED_FACTS, FACT_NAMES = 2**12, DOCUMENT_SCHEMA.names[:6]
UNKNOWN = "(unknown)"
# Values of one column are alternatives; columns must all match.
Where = Mapping[str, str | Sequence[str]]
Conditions = tuple[tuple[str, tuple[str, ...]], ...]
CodeName = Literal["int8", "pq", "pq12"]
# Dimensions of a part, and centers of each.
PARTS = {"pq": 4, "pq12": 12}
CENTRES = 256
# Positions that the centers are learned from: the most that faiss uses.
SAMPLE = 256 * CENTRES
# States multiplied with all centers at once: enough to amortise a call, few enough for the cache.
STATES_AT_ONCE = 64


def parse_where(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``column=value`` conditions; several values of one column are alternatives."""
    where: dict[str, list[str]] = {}
    for condition in conditions:
        column, _, value = condition.partition("=")
        if not value:
            raise InputError(f"the filter {condition!r}: expected COLUMN=VALUE, as in license=CC0.")
        where.setdefault(column.strip(), []).append(value)
    normalised(where)
    return where


def normalised(where: Where | None) -> Conditions:
    """Return a filter as sorted tuples; InputError for an unknown column."""
    conditions: list[tuple[str, tuple[str, ...]]] = []
    for column, values in (where or {}).items():
        check_choice("the column of the filter", column, layout.GROUP_COLUMNS)
        several = {values} if isinstance(values, str) else set(values)
        conditions.append((column, tuple(sorted(several))))
    return tuple(sorted(conditions))


class Keys(NamedTuple):
    """The distinct values of a column, and the index of every row's value, int [rows]."""

    names: list[str]
    codes: np.ndarray

    @classmethod
    def from_chunks(cls, chunks: Iterable[pa.Array]) -> Keys:
        """Encode a column chunk by chunk; nulls are "(unknown)"."""
        encoded = [chunk.fill_null(UNKNOWN).dictionary_encode() for chunk in chunks]
        column = pa.chunked_array(encoded, pa.dictionary(pa.int32(), pa.string()))
        column = column.unify_dictionaries().combine_chunks()
        return cls(column.dictionary.to_pylist(), column.indices.to_numpy())


class Int8Codes:
    """A byte for each dimension and a scale for each state."""

    def states(self, records: np.ndarray) -> Tensor:
        """Return scale · code / 127, of length 1 up to rounding: float32 [n, d]."""
        factors = torch.from_numpy(records["scale"].astype(np.float32) / 127)
        return torch.from_numpy(records["code"]).float() * factors[:, None]

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
        return products.numpy() * (records["scale"].astype(np.float32) / 127)

    def put(self, states: np.ndarray, into: np.ndarray) -> None:
        """Encode unit states, float32 [n, d], into the fields of n records."""
        scales = np.abs(states).max(1).astype(np.float16)
        factor = np.divide(127, scales, out=np.zeros(len(scales), np.float32), where=scales > 0)
        into["scale"] = scales
        into["code"] = np.rint(states * factor[:, None]).clip(-127, 127)


class ProductCodes:
    """The nearest center of each part of a state, zero-padded to whole parts."""

    def __init__(self, width: int, centres: np.ndarray) -> None:
        self.width, self.centres = width, centres
        parts, count, part = centres.shape
        self._table, self._first = torch.from_numpy(centres), torch.arange(parts) * count
        inside = pad(torch.ones(width), (0, -width % part)).view(parts, 1, part)
        self._squares = (self._table * inside).square().sum(2).flatten()

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
        parts, _, part = self.centres.shape
        quantiser = _faiss().ProductQuantizer(part * parts, parts, 8)
        _faiss().copy_array_to_vector(self.centres.ravel(), quantiser.centroids)
        return quantiser

    def put(self, states: np.ndarray, into: np.ndarray) -> None:
        """As :meth:`Int8Codes.put`; each state is encoded by itself."""
        into["code"] = self._quantiser.compute_codes(_padded(states, self.centres.shape[2]))


Codes = Int8Codes | ProductCodes


def parts_of(width: int, name: str = "pq") -> int:
    """Return the number of parts of a state."""
    return -(-width // PARTS[name])


def learn_codes(directory: Path, name: str, states: np.ndarray) -> ProductCodes:
    """Learn the centers of product quantisation, and save them; deterministic.

    ``states`` are float32 [n, d], n ≥ 1.
    """
    faiss, width, part = _faiss(), states.shape[1], PARTS[name]
    parts = parts_of(width, name)
    quantiser = faiss.ProductQuantizer(part * parts, parts, 8)
    quantiser.cp.min_points_per_centroid = 1  # no warning for small corpora
    threads = faiss.omp_get_max_threads()
    # Sums depend on the number of threads.
    faiss.omp_set_num_threads(1)
    try:
        # faiss needs as many states as centers: repeat a smaller sample.
        quantiser.train(_padded(np.resize(states, (max(len(states), CENTRES), width)), part))
    finally:
        faiss.omp_set_num_threads(threads)
    centres = faiss.vector_to_array(quantiser.centroids).reshape(parts, CENTRES, part)
    np.save(directory / layout.CELL_CENTRES_FILE, centres)
    return ProductCodes(width, centres)


def check_codes(name: str) -> CodeName:
    """Return the name of a code; InputError if it is unknown, or faiss is missing."""
    if name in PARTS:
        _faiss()
    else:
        check_choice("--codes", name, ("int8", "pq"))
    return cast("CodeName", name)


def open_codes(directory: Path | None, name: str, width: int) -> Codes:
    """Open the code of cells; without a directory, one that is as fast."""
    if name == "int8":
        return Int8Codes()
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
            "--codes pq needs faiss: pip install 'prismlm[pq]', or use --codes int8."
        ) from error
    return faiss


@dataclass(frozen=True)
class CellsMeta:
    """The format of the cells of a lens."""

    codes: str
    share: float  # of the windows that were read
    rows: int
    vocabulary: int  # V in the key of a range, cell · V + token
    width: int
    position_bytes: int
    token_bytes: int


def record_type(cells: CellsMeta) -> np.dtype:
    """Return the record of a position: offset, token, probability of the next, coded state."""
    position, token = POSITION_TYPES[cells.position_bytes], TOKEN_TYPES[cells.token_bytes]
    fields: list[Any] = [("position", position), ("read", token), ("probability", "<f2")]
    if cells.codes == "int8":
        return np.dtype([*fields, ("scale", "<f2"), ("code", "i1", (cells.width,))])
    return np.dtype([*fields, ("code", "u1", (parts_of(cells.width, cells.codes),))])


class CellRange(NamedTuple):
    """Successive cells in files of their own: arrays that are memory-mapped or in a store."""

    first_row: int
    records: Any
    keys: Any  # cell · V + token of each pair of cell and next token
    starts: Any  # the first row of each, counted from ``first_row``


class Cells:
    """The positions of a lens as rows sorted by cell, next token and position.

    Cells are stored in one range or several. Of these and of the table of documents, a question
    reads what it needs.
    """

    def __init__(self, files: Path | LensFiles, meta: dict[str, Any]) -> None:
        self._files = files_of(files)
        self.meta = CellsMeta(**{field.name: meta[field.name] for field in fields(CellsMeta)})
        if self.meta.codes != "int8":
            self._files.check([layout.CELL_CENTRES_FILE])
        self.codes = open_codes(self._files.path, self.meta.codes, self.meta.width)
        self._dtype = record_type(self.meta)
        stored = meta.get("ranges") or [{"first_cell": 0, "rows": self.meta.rows}]
        names = layout.file_names(layout.CELL_FILES, len(stored))
        self._files.check(names)
        arrays = iter(self._files.arrays(*names))
        self._first_keys = np.array([part["first_cell"] * self.meta.vocabulary for part in stored])
        self._first_rows = np.cumsum([0, *(part["rows"] for part in stored[:-1])])
        self._ranges = [CellRange(row, *islice(arrays, 3)) for row in self._first_rows.tolist()]
        self._document_files = meta.get("document_files", 1)
        # The values of a column of the documents, and the share of each in all positions.
        self.keys = cache(lambda column: Keys.from_chunks(self.documents.chunks(column)))
        self.base_rates = cache(
            lambda column: np.bincount(self.keys(column).codes, self.document_rates)
        )
        # doc_id, source, domain, license, title and url of a document.
        self.facts = lru_cache(CACHED_FACTS)(lambda row: self.documents.row(row, FACT_NAMES))

    @property
    def keys_and_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """The key and the first row of every pair of cell and next token, all in memory."""
        keys = [np.asarray(part.keys[:]) for part in self._ranges]
        starts = [np.asarray(part.starts[:]) + part.first_row for part in self._ranges]
        return np.concatenate(keys), np.concatenate(starts)

    def __len__(self) -> int:
        return self.meta.rows

    def ranges(self, cells: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows of pairs of cell and next token start and stop: [n] each."""
        key = cells.astype(np.int64) * self.meta.vocabulary + tokens
        return self._first_row(key), self._first_row(key + 1)

    def ranges_except(self, cells: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the rows of a cell with other next tokens start and stop: [n, 2] each."""
        cell = cells.astype(np.int64) * self.meta.vocabulary
        edges = [cell, cell + tokens, cell + tokens + 1, cell + self.meta.vocabulary]
        rows = self._first_row(np.stack(edges, axis=1).ravel()).reshape(-1, 4)
        return rows[:, ::2], rows[:, 1::2]

    def rows_of(self, cell: int) -> np.ndarray:
        """Return the rows of a cell, int64 [n]."""
        first, last = self._first_row(np.array([cell, cell + 1]) * self.meta.vocabulary)
        return np.arange(first, last)

    def _first_row(self, key: np.ndarray) -> np.ndarray:
        """Return the first row with a key or a larger one: int64 [n]."""
        rows = np.empty(len(key), np.int64)
        for part, chosen in self._by_range(self._first_keys, key):
            index = part.keys.searchsorted(key[chosen])
            inside = index < len(part.starts)
            first = np.full(len(index), len(part.records))
            first[inside] = part.starts.take(index[inside])
            rows[chosen] = first + part.first_row
        return rows

    def _by_range(
        self, firsts: np.ndarray, values: np.ndarray
    ) -> Iterator[tuple[CellRange, np.ndarray]]:
        """Yield ranges with the indices of the keys or rows that lie in them."""
        number = np.searchsorted(firsts, values, side="right") - 1
        for i in np.unique(number).tolist():
            yield self._ranges[i], np.flatnonzero(number == i)

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of records: position, token read there, probability, coded state."""
        if len(self._ranges) == 1:
            return self._ranges[0].records.take(rows)
        result = np.empty(len(rows), self._dtype)
        # ``put`` and ``take`` copy records whole, an index field by field.
        for part, chosen in self._by_range(self._first_rows, rows):
            result.put(chosen, part.records.take(rows[chosen] - part.first_row))
        return result

    @cached_property
    def documents(self) -> ParquetTable:
        """One row per document that was read, in corpus order."""
        names = layout.file_names([layout.CELL_DOCUMENTS_FILE], self._document_files)
        self._files.check(names)
        files = {f"{self._files.address}/{name}": self._files.table_file(name) for name in names}
        return ParquetTable(files, DOCUMENT_SCHEMA, layout.REBUILD)

    @cached_property
    def starts(self) -> np.ndarray:
        """The global position of each document's first token, int64 [documents]."""
        return self.documents.column("start").to_numpy()

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each document has, int64 [documents]."""
        return self.documents.column("length").to_numpy()

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the row in ``documents`` of each global position."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def document_number(self, doc_id: str) -> int:
        """Return a document's row, or −1 if there is no such id."""
        return self.documents.find("doc_id", doc_id)

    def matching(self, conditions: Conditions) -> np.ndarray:
        """Return which documents match a filter that is not empty: bool [documents]."""
        masks: list[np.ndarray] = []
        for column, values in conditions:
            names, codes = self.keys(column)
            if unknown := [value for value in values if value not in names]:
                raise InputError(
                    f"no text of this lens has {column}={unknown[0]}.{suggest(unknown[0], names)} "
                    f"Known are: {', '.join(sorted(names)[:8])} …"
                )
            masks.append(np.isin(codes, [names.index(value) for value in values]))
        return np.logical_and.reduce(masks)

    @cached_property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions of each cell and of each next token, int64 [up to K] and [V]."""
        if all(map(self._files.has, layout.COUNT_FILES)):
            self._files.check(layout.COUNT_FILES)
            cells, tokens = self._files.arrays(*layout.COUNT_FILES)
            return np.array(cells), np.array(tokens)
        keys, starts = self.keys_and_starts
        cell, token = np.divmod(keys, self.meta.vocabulary)
        sizes, count = np.diff(np.append(starts, len(self))), self.meta.vocabulary
        counts = np.bincount(cell, sizes), np.bincount(token, sizes, count)
        return counts[0].astype(np.int64), counts[1].astype(np.int64)

    @cached_property
    def token_rates(self) -> np.ndarray:
        """The share of each token among the next tokens of all positions, float64 [V]."""
        return self.counts[1] / max(1, len(self))

    @cached_property
    def document_rates(self) -> np.ndarray:
        """The share of each document in all positions, float64 [documents]."""
        # The last token of a document has no position.
        weights = self.lengths - 1
        return weights / max(1, weights.sum())

    def sizes(self, cells: int) -> np.ndarray:
        """Return the number of positions in each of K cells, int64 [K]."""
        return np.pad(self.counts[0], (0, cells - len(self.counts[0])))

    def cells_of(self, document: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of a document in each of K cells, and the sizes of these: [K] each.

        It scans all records: about a second per few million.
        """
        first = self.starts[document]
        last, result = first + self.lengths[document], np.zeros(cells, np.int64)
        for part in self._ranges:
            for begin in range(0, len(part.records), ROWS_AT_ONCE):
                positions = part.records[begin : begin + ROWS_AT_ONCE]["position"]
                rows = np.flatnonzero((positions >= first) & (positions < last)) + begin
                keys = part.keys.take(part.starts.searchsorted(rows + 1) - 1)
                result += np.bincount(keys // self.meta.vocabulary, minlength=cells)
        return result, self.sizes(cells)


class Neighbours(NamedTuple):
    """Positions compared with a state, in the order of the query, [u] each."""

    pair: np.ndarray  # the index of the pair of cell and token, or of the range
    row: np.ndarray  # in the cells
    position: np.ndarray  # global
    read: np.ndarray  # the token there
    cosine: np.ndarray  # with the state of the query, float32
    sampling_weight: np.ndarray  # positions of its range that it represents, float64
    probability: np.ndarray  # the model's, of the token that came next there, float16


def neighbours(
    cells: Cells, query: np.ndarray, cell: np.ndarray, token: np.ndarray, states: Tensor
) -> Neighbours:
    """Compare unit states, float32 [Q, d], with the positions of cells that have a next token.

    ``query`` is the state of each pair of cell and token, int64 [p], ascending.
    """
    return compared(cells, query, *cells.ranges(cell, token), states, MOST_OF_A_RANGE)


def compared(
    cells: Cells, query: np.ndarray, first: np.ndarray, last: np.ndarray, states: Tensor, most: int
) -> Neighbours:
    """Compare states with the rows from ``first`` up to, not including, ``last``, int64 [p].

    A range of more than ``most`` rows is sampled, in evenly spaced stretches of 32.
    """
    sizes = last - first
    counts = np.minimum(sizes, most)
    pair, offset = group_members(counts)
    step = sizes / np.maximum(counts, 1)
    stretch, within = np.divmod(offset, STRETCH)
    rows = first[pair] + (stretch * (STRETCH * step[pair])).astype(np.int64) + within
    position, read = np.empty((2, len(rows)), dtype=np.int64)
    cosine = np.empty(len(rows), dtype=np.float32)
    probability = np.empty(len(rows), dtype=np.float16)
    owner = query[pair]
    for begin in range(0, len(rows), RECORDS_AT_ONCE):
        part = slice(begin, begin + RECORDS_AT_ONCE)
        records = cells.records(rows[part])
        position[part], read[part] = records["position"], records["read"]
        probability[part] = records["probability"]
        cosine[part] = cells.codes.cosines(records, states, owner[part])
    return Neighbours(pair, rows, position, read, cosine, step[pair], probability)


def group_members(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the group of each member of groups of some sizes, and its number within the group."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def largest(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of at most ``limit`` largest values, descending; ties by index."""
    candidates = np.arange(len(values))
    if 0 < limit < len(values):
        # A full sort is much slower.
        candidates = np.flatnonzero(values >= np.partition(values, -limit)[-limit])
    return candidates[np.argsort(-values[candidates], kind="stable")][: max(0, limit)]
