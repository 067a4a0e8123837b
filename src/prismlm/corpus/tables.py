"""Tables in Parquet files, of which rows are read by row group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import FormatError

# Each has a megabyte of text, or one document.
CACHED_ROW_GROUPS = 16


class ParquetTable:
    """Parquet files, such as those of all shards, as one table; caches row groups.

    Args:
        files: paths by name, for messages.
        schema: of the columns to read.
        advice: what to do about damaged files.
    """

    def __init__(self, files: Mapping[str, Path], schema: pa.Schema, advice: str) -> None:
        self._files, self._schema, self._advice = files, schema, advice
        self._footers: dict[str, pq.FileMetaData] = {}
        self._group = lru_cache(CACHED_ROW_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return int(self._groups[0][-1])

    def value(self, number: int, column: str) -> Any:
        """Return one value of a row."""
        return self.row(number, (column,))[column]

    def row(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        """Return values of a row."""
        table, first = self._group_of(number, tuple(self._schema.names))
        return {name: table[name][number - first].as_py() for name in columns}

    def take(self, numbers: np.ndarray, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Return the rows ``numbers``, which ascend, with all columns or some."""
        names = tuple(self._schema.names) if columns is None else columns
        tables, done = [self._schema.empty_table().select(names)], 0
        while done < len(numbers):
            table, first = self._group_of(int(numbers[done]), names)
            count = int(np.searchsorted(numbers[done:], first + len(table)))
            tables.append(table.take(pa.array(numbers[done : done + count] - first)))
            done += count
        return pa.concat_tables(tables)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all rows."""
        return pa.chunked_array([*self.chunks(name)], self._schema.field(name).type)

    def chunks(self, name: str) -> Iterator[pa.Array]:
        """Yield a column by row group, each read when it is needed."""
        for path in self._files:
            with self._opened(path) as file:
                for group in range(file.num_row_groups):
                    yield from file.read_row_group(group, columns=[name])[name].chunks

    def find(self, column: str, value: object) -> int:
        """Return the first row with a value, or −1."""
        before = 0
        for chunk in self.chunks(column):
            row = chunk.index(value).as_py()
            if row >= 0:
                return before + row
            before += len(chunk)
        return -1

    def _group_of(self, number: int, columns: tuple[str, ...]) -> tuple[pa.Table, int]:
        """Return the row group of a row, and the number of the first row in it."""
        starts, groups = self._groups
        index = int(np.searchsorted(starts, number, side="right")) - 1
        return self._group(*groups[index], columns), int(starts[index])

    @cached_property
    def _groups(self) -> tuple[np.ndarray, list[tuple[str, int]]]:
        """The first row of each row group and the end, and its file and number in the file."""
        sizes, groups = list[int](), list[tuple[str, int]]()
        for path in self._files:
            with self._opened(path) as file:
                for number in range(file.num_row_groups):
                    sizes.append(file.metadata.row_group(number).num_rows)
                    groups.append((path, number))
        return np.cumsum([0, *sizes]), groups

    def _read_group(self, path: str, group: int, names: tuple[str, ...]) -> pa.Table:
        with self._opened(path) as file:
            return file.read_row_group(group, columns=[*names]).select(names).combine_chunks()

    @contextmanager
    def _opened(self, path: str) -> Iterator[pq.ParquetFile]:
        footer = self._footers.get(path)
        options: dict[str, Any] = {"page_checksum_verification": True, "metadata": footer}
        try:
            with pq.ParquetFile(self._files[path], **options) as table:
                self._footers[path] = table.metadata
                yield table
        except (pa.ArrowException, OSError, KeyError) as error:
            raise FormatError(f"{path} is damaged ({error}). {self._advice}") from error
