"""The cells of a lens: every indexed position by nearest prototype and next token.

Filters choose among the documents of these positions, by source, domain and licence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.errors import FormatError, InputError, check_choice, check_kind, check_text, suggest
from prismlm.lens import layout
from prismlm.lens.codes import Codes, open_codes

ROWS_AT_ONCE = 2**20
POSITION_TYPES, TOKEN_TYPES = {4: "<u4", 8: "<i8"}, {2: "<u2", 4: "<i4"}
# Positions of one range that are compared at most, in stretches that are contiguous on disk.
MOST_OF_A_RANGE = 512
STRETCH = 32
RECORDS_AT_ONCE = 2**15
UNKNOWN = "(unknown)"
# Values of one column are alternatives; columns must all match.
Where = Mapping[str, str | Sequence[str]]
Conditions = tuple[tuple[str, tuple[str, ...]], ...]


def parse_where(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``column=value`` conditions; several values of one column are alternatives."""
    where: dict[str, list[str]] = {}
    for condition in conditions:
        column, _, value = condition.partition("=")
        if not value:
            raise InputError(
                f"the filter {condition!r} cannot be read: expected COLUMN=VALUE, such as "
                "license=CC0."
            )
        where.setdefault(column.strip(), []).append(value)
    normalised(where)
    return where


def normalised(where: Where | None) -> Conditions:
    """Return a filter as sorted tuples; InputError if it is invalid."""
    if where is None:
        return ()
    check_kind("the filter", where, Mapping, 'a column and its values, such as {"license": "CC0"}')
    conditions: list[tuple[str, tuple[str, ...]]] = []
    for column, values in where.items():
        check_choice("the column of the filter", column, layout.GROUP_COLUMNS)
        what, kinds = f"the value of {column}", (list, tuple, set, frozenset)
        several = check_kind(what, [values] if isinstance(values, str) else values, kinds, "text")
        conditions.append((column, tuple(sorted({check_text(what, value) for value in several}))))
    return tuple(sorted(conditions))


class Keys(NamedTuple):
    """The distinct values of a column, and the index of every row's value, int [rows]."""

    names: list[str]
    codes: np.ndarray

    @classmethod
    def from_column(cls, column: pa.ChunkedArray) -> Keys:
        """Encode a column of a table; nulls are "(unknown)"."""
        encoded = column.fill_null(UNKNOWN).combine_chunks().dictionary_encode()
        return cls(encoded.dictionary.to_pylist(), encoded.indices.to_numpy())


def record_type(codes: Codes, position_bytes: int = 8, token_bytes: int = 4) -> np.dtype:
    """Return the record of a position: offset, token, probability of the next, coded state."""
    position, token = POSITION_TYPES[position_bytes], TOKEN_TYPES[token_bytes]
    first = ("position", position), ("read", token), ("probability", "<f2")
    return np.dtype([*first, *codes.fields])


@dataclass(frozen=True)
class CellsMeta:
    """The format of the cells of a lens."""

    codes: str
    share: float  # of all positions that were kept
    rows: int
    vocabulary: int  # V in the key of a range, cell · V + token
    width: int
    position_bytes: int
    token_bytes: int


class Cells:
    """The positions of a lens, memory-mapped, as rows sorted by cell, next token and position.

    ``check`` compares files of the lens with their digests before they are read.
    """

    def __init__(
        self,
        directory: Path,
        meta: dict[str, Any],
        check: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self._directory, self._check_files = directory, check
        self.path = directory / layout.CELLS_FILE
        # Older lenses have checksums here.
        self.meta = CellsMeta(**{key: v for key, v in meta.items() if key != "checksums"})
        if self.meta.codes != "int8":
            check([layout.CELL_CENTRES_FILE])
        self.codes = open_codes(directory, self.meta.codes, self.meta.width)
        record = record_type(self.codes, self.meta.position_bytes, self.meta.token_bytes)
        opened = (layout.open_array(directory / name) for name in layout.CELL_FILES)
        self._records, self._keys, self._starts = opened
        if self._records.dtype != record or len(self._records) != self.meta.rows:
            raise FormatError(f"{self.path} does not match {layout.META_FILE}. {layout.REBUILD}")
        self._bytes = np.asarray(self._records).view(np.uint8).reshape(-1, record.itemsize)
        self._keys_of: dict[str, Keys] = {}
        self._facts: dict[int, dict[str, Any]] = {}

    @cached_property
    def keys_and_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """The key and the first row of every range."""
        self._check_files([layout.CELL_KEYS_FILE, layout.CELL_STARTS_FILE])
        return self._keys, self._starts

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
        rows = self._first_row(np.stack(edges, axis=1))
        return rows[:, ::2], rows[:, 1::2]

    def _first_row(self, key: np.ndarray) -> np.ndarray:
        # The first row with a key, or a larger one.
        keys, starts = self.keys_and_starts
        index = np.searchsorted(keys, key)
        rows = np.full(index.shape, self.meta.rows)
        inside = index < len(starts)
        rows[inside] = starts[index[inside]]
        return rows

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of records: position, token read there, probability, coded state."""
        # Bytes are copied row by row, which is faster than field by field.
        return self._bytes.take(rows, axis=0).view(self._records.dtype)[:, 0]

    def positions(self, first: int, count: int) -> np.ndarray:
        """Return the global positions of successive rows, int64 [at most count]."""
        return self._records["position"][first : first + count].astype(np.int64)

    @cached_property
    def documents(self) -> pa.Table:
        """``cell-documents.parquet``: one row per document that was read, in corpus order."""
        return self._read_documents().combine_chunks()

    def _read_documents(self, columns: list[str] | None = None) -> pa.Table:
        self._check_files([layout.CELL_DOCUMENTS_FILE])
        path = self._directory / layout.CELL_DOCUMENTS_FILE
        return layout.read_table(path, DOCUMENT_SCHEMA, columns)

    def facts(self, document: int) -> dict[str, Any]:
        """Return doc_id, source, domain, license, title and url of a document."""
        if document not in self._facts:
            names = DOCUMENT_SCHEMA.names[:6]
            self._facts[document] = {n: self.documents[n][document].as_py() for n in names}
        return self._facts[document]

    @cached_property
    def starts(self) -> np.ndarray:
        """The global position of each document's first token, int64 [documents]."""
        # Read alone, since all columns of a large corpus take much memory.
        return self._read_documents(["start"])["start"].to_numpy()

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the row in ``documents`` of each global position."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def document_number(self, doc_id: str) -> int:
        """Return a document's row, or −1 if there is no such id."""
        return int(pc.index(self.documents["doc_id"], doc_id).as_py())

    def keys(self, column: str) -> Keys:
        """Return the values of a column of the documents; nulls are "(unknown)"."""
        if column not in self._keys_of:
            self._keys_of[column] = Keys.from_column(self.documents[column])
        return self._keys_of[column]

    def matching(self, conditions: Conditions) -> np.ndarray:
        """Return which documents match a filter that is not empty: bool [documents]."""
        masks: list[np.ndarray] = []
        for column, values in conditions:
            names, codes = self.keys(column)
            for value in values:
                if value not in names:
                    listed = ", ".join(sorted(names)[:8]) + (" …" if len(names) > 8 else "")
                    raise InputError(
                        f"no text of this lens has {column}={value}.{suggest(value, names)} "
                        f"Known are: {listed}."
                    )
            masks.append(np.isin(codes, [names.index(value) for value in values]))
        return np.logical_and.reduce(masks)

    @cached_property
    def _range_sizes(self) -> np.ndarray:
        return np.diff(np.append(self.keys_and_starts[1], self.meta.rows))

    @cached_property
    def token_rates(self) -> np.ndarray:
        """The share of each token among the next tokens of all positions, float64 [V]."""
        tokens = self.keys_and_starts[0] % self.meta.vocabulary
        counts = np.bincount(tokens, self._range_sizes, minlength=self.meta.vocabulary)
        return counts / max(1, len(self))

    @cached_property
    def document_rates(self) -> np.ndarray:
        """The share of each document in all positions, float64 [documents]."""
        # The last token of a document has no position.
        weights = self.documents["length"].to_numpy() - 1
        return weights / max(1, weights.sum())

    def base_rates(self, column: str) -> np.ndarray:
        """Return the share of each value of a column in all positions, float64 [values]."""
        return np.bincount(self.keys(column).codes, self.document_rates)

    def sizes(self, cells: int) -> np.ndarray:
        """Return the number of positions in each of K cells, int64 [K]."""
        owners = self.keys_and_starts[0] // self.meta.vocabulary
        return np.bincount(owners, self._range_sizes, minlength=cells).astype(np.int64)

    def cells_of(self, document: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of a document in each of K cells, and the sizes of these: [K] each.

        It scans all records: about a second per few million.
        """
        keys, starts = self.keys_and_starts
        first = int(self.starts[document])
        last = first + int(self.documents["length"][document].as_py())
        parts: list[np.ndarray] = []
        for begin in range(0, len(self), ROWS_AT_ONCE):
            positions = self.positions(begin, ROWS_AT_ONCE)
            parts.append(np.flatnonzero((positions >= first) & (positions < last)) + begin)
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        cell = keys[np.searchsorted(starts, rows, side="right") - 1] // self.meta.vocabulary
        return np.bincount(cell, minlength=cells), self.sizes(cells)


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


def nearest_of(values: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Return the largest value of each owner, −1 if it has none: float32 [count]."""
    nearest = np.full(count, -1, dtype=np.float32)
    np.maximum.at(nearest, owner, values)
    return nearest


def largest(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of at most ``limit`` largest values, descending; ties by index."""
    candidates = np.arange(len(values))
    if 0 < limit < len(values):
        # A full sort is much slower.
        candidates = np.flatnonzero(values >= np.partition(values, -limit)[-limit])
    return candidates[np.argsort(-values[candidates], kind="stable")][: max(0, limit)]
