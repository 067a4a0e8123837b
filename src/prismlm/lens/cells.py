"""Every indexed position in the cell of its nearest prototype, by next token: reading a lens's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.errors import FormatError, InputError, suggest
from prismlm.lens import layout
from prismlm.lens.codes import Codes, open_codes
from prismlm.lens.where import Conditions, Keys

ROWS_AT_ONCE = 2**20
# Positions and tokens are kept in as few bytes as the last of them needs.
POSITION_TYPES = {4: "<u4", 8: "<i8"}
TOKEN_TYPES = {2: "<u2", 4: "<i4"}


def record_type(codes: Codes, position_bytes: int = 8, token_bytes: int = 4) -> np.dtype:
    """Return the record of a position: offset, token there, chance of the next, coded state."""
    position, token = POSITION_TYPES[position_bytes], TOKEN_TYPES[token_bytes]
    first = ("position", position), ("read", token), ("probability", "<f2")
    return np.dtype([*first, *codes.fields])


@dataclass(frozen=True)
class CellsMeta:
    """How cells were written.

    Attributes:
        codes: of hidden states: int8, pq or pq12.
        share: of all positions that were kept, drawn by a hash of each; 1.0 keeps all.
        rows: positions kept.
        vocabulary: tokens that the key of a range is counted in: key = cell · V + token.
        width: d.
        position_bytes: of a global position, 4 or 8.
        token_bytes: of a token, 2 or 4.
    """

    codes: str
    share: float
    rows: int
    vocabulary: int
    width: int
    position_bytes: int
    token_bytes: int


class Cells:
    """The positions of a lens, memory-mapped; a question reads the ranges that it needs alone.

    A row is a position's number, in the order of cell, next token and position.

    Args:
        directory: of the lens.
        meta: what ``meta.json`` says of them.
        check: compares files of the lens that are read as a whole with their digests.

    Attributes:
        meta: how they were written.
        codes: of the hidden states of records.
    """

    def __init__(
        self,
        directory: Path,
        meta: dict[str, Any],
        check: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self._directory, self._check_files = directory, check
        self.path = directory / layout.CELLS_FILE
        # Older lenses noted checksums here.
        self.meta = CellsMeta(**{key: v for key, v in meta.items() if key != "checksums"})
        if self.meta.codes != "int8":
            check([layout.CELL_CENTRES_FILE])
        self.codes = open_codes(directory, self.meta.codes, self.meta.width)
        record = record_type(self.codes, self.meta.position_bytes, self.meta.token_bytes)
        opened = (layout.open_array(directory / name) for name in layout.CELL_FILES)
        self._records, self._keys, self._starts = opened
        if self._records.dtype != record or len(self._records) != self.meta.rows:
            raise FormatError(f"{self.path} is not as {layout.META_FILE} says. {layout.REBUILD}")
        self._bytes = np.asarray(self._records).view(np.uint8).reshape(-1, record.itemsize)
        self._columns: dict[str, Keys] = {}
        self._facts: dict[int, dict[str, Any]] = {}

    @cached_property
    def keys_and_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """The key and the first row of every range."""
        self._check_files([layout.CELL_KEYS_FILE, layout.CELL_STARTS_FILE])
        return self._keys, self._starts

    def __len__(self) -> int:
        return self.meta.rows

    def ranges(self, cells: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row of each pair of cell and next token, and the one after: [n] each."""
        key = cells.astype(np.int64) * self.meta.vocabulary + tokens
        return self._first_row(key), self._first_row(key + 1)

    def beside(self, cells: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where a cell's rows of other next tokens start and stop, before and after: [n, 2].

        Args:
            cells, tokens: pairs, int64 [n].
        """
        cell = cells.astype(np.int64) * self.meta.vocabulary
        edges = [cell, cell + tokens, cell + tokens + 1, cell + self.meta.vocabulary]
        rows = self._first_row(np.stack(edges, axis=1))
        return rows[:, ::2], rows[:, 1::2]

    def _first_row(self, key: np.ndarray) -> np.ndarray:
        """Return where the rows of keys start, or of the next keys that there are."""
        keys, starts = self.keys_and_starts
        at = np.searchsorted(keys, key)
        rows = np.full(at.shape, self.meta.rows)
        inside = at < len(starts)
        rows[inside] = starts[at[inside]]
        return rows

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of records: position, token read there, probability, scale and code."""
        # As plain bytes, rows are copied whole and not field by field.
        return self._bytes.take(rows, axis=0).view(self._records.dtype)[:, 0]

    def positions(self, first: int, count: int) -> np.ndarray:
        """Return the global positions of successive rows, int64 [at most count]."""
        return self._records["position"][first : first + count].astype(np.int64)

    def _all_positions(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row and the positions of each million rows."""
        for begin in range(0, len(self), ROWS_AT_ONCE):
            yield begin, self.positions(begin, ROWS_AT_ONCE)

    def tokens(self, start: int, length: int, end: int) -> np.ndarray:
        """Return the tokens of one document from a global position on, int64 [length].

        Of cells that keep every position. All records are looked at for the first. ``end`` is the
        token that ends a document, which has no record.
        """
        first = int(self._offset(np.array([start]))[0])
        found = self._tokens[first : first + length].astype(np.int64)
        return np.where(found < 0, end, found)

    def _offset(self, positions: np.ndarray) -> np.ndarray:
        """Return where positions lie if one document follows the other, int64 [n]."""
        lengths = self.documents["length"].to_numpy()
        document = self.document_of(positions)
        return (np.cumsum(lengths) - lengths - self.starts)[document] + positions

    @cached_property
    def _tokens(self) -> np.ndarray:
        """The tokens of all documents in order, −1 for their ends: int32 [Σ lengths]."""
        found = np.full(int(self.documents["length"].to_numpy().sum()), -1, dtype=np.int32)
        for begin, positions in self._all_positions():
            found[self._offset(positions)] = self._records["read"][begin : begin + len(positions)]
        return found

    @cached_property
    def documents(self) -> pa.Table:
        """``cell-documents.parquet``: one row per document that was read, in corpus order."""
        return self._read_documents().combine_chunks()

    def _read_documents(self, columns: list[str] | None = None) -> pa.Table:
        self._check_files([layout.CELL_DOCUMENTS_FILE])
        path = self._directory / layout.CELL_DOCUMENTS_FILE
        return layout.read_table(path, DOCUMENT_SCHEMA, columns)

    def facts(self, document: int) -> dict[str, Any]:
        """Return what is known of a document: doc_id, source, domain, license, title and url."""
        if document not in self._facts:
            names = DOCUMENT_SCHEMA.names[:6]
            self._facts[document] = {n: self.documents[n][document].as_py() for n in names}
        return self._facts[document]

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each document starts, int64 [documents]."""
        # Of a large corpus all columns take some hundred bytes a document.
        return self._read_documents(["start"])["start"].to_numpy()

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """Return which document, by its row in ``documents``, each global position lies in."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def document_number(self, doc_id: str) -> int:
        """Return a document's row, or −1 where there is none of this id."""
        return int(pc.index(self.documents["doc_id"], doc_id).as_py())

    def keys(self, column: str) -> Keys:
        """Return the values of a column of the documents; nulls are "(unknown)"."""
        if column not in self._columns:
            self._columns[column] = Keys.of(self.documents[column])
        return self._columns[column]

    def matching(self, conditions: Conditions) -> np.ndarray:
        """Return which documents match a filter that is not empty: bool [documents]."""
        found: list[np.ndarray] = []
        for column, values in conditions:
            names, codes = self.keys(column)
            for value in values:
                if value not in names:
                    listed = ", ".join(sorted(names)[:8]) + (" …" if len(names) > 8 else "")
                    raise InputError(
                        f"no text of this lens has {column}={value}.{suggest(value, names)} "
                        f"Known are: {listed}."
                    )
            found.append(np.isin(codes, [names.index(value) for value in values]))
        return np.logical_and.reduce(found)

    @cached_property
    def _range_sizes(self) -> np.ndarray:
        return np.diff(np.append(self.keys_and_starts[1], self.meta.rows))

    @cached_property
    def token_rates(self) -> np.ndarray:
        """The share of each token in what comes next at all positions, float64 [V]."""
        tokens = self.keys_and_starts[0] % self.meta.vocabulary
        counts = np.bincount(tokens, self._range_sizes, minlength=self.meta.vocabulary)
        return counts / max(1, len(self))

    @cached_property
    def document_rates(self) -> np.ndarray:
        """The share of each document in all positions of the index, float64 [documents]."""
        # The end of a document predicts nothing of it, so it is no position of the index.
        weights = self.documents["length"].to_numpy() - 1
        return weights / max(1, weights.sum())

    def base_rates(self, column: str) -> np.ndarray:
        """Return the share of each key of a column in all positions, float64 [keys]."""
        names, codes = self.keys(column)
        return np.bincount(codes, self.document_rates, minlength=len(names))

    def sizes(self, cells: int) -> np.ndarray:
        """Return how many positions each of K cells holds, int64 [K]."""
        owners = self.keys_and_starts[0] // self.meta.vocabulary
        return np.bincount(owners, self._range_sizes, minlength=cells).astype(np.int64)

    def cells_of(self, document: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how many positions of a document each cell holds, and how many it has at all.

        Every record is looked at, since cells are not ordered by document: about a second for some
        million. ``document`` is a row of ``documents``, ``cells`` is K; int64 [K] each.
        """
        keys, starts = self.keys_and_starts
        first = int(self.starts[document])
        last = first + int(self.documents["length"][document].as_py())
        parts = [
            np.flatnonzero((positions >= first) & (positions < last)) + begin
            for begin, positions in self._all_positions()
        ]
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        cell = keys[np.searchsorted(starts, rows, side="right") - 1] // self.meta.vocabulary
        return np.bincount(cell, minlength=cells), self.sizes(cells)
