"""Parquet tables of corpora and lenses, on a disk or in a store: row groups are read one by one."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import FormatError

# Each has a megabyte of text, or one document.
CACHED_ROW_GROUPS = 16
# Of one column, fetched at once from a store.
GROUPS_AT_ONCE = 64

# Returns ranges of bytes, [first, last), of a file.
Read = Callable[[Sequence[tuple[int, int]]], list[bytes]]


class RangedFile(io.RawIOBase):
    """A file of ``size`` bytes, of which ``read_ranges`` reads some ranges at once."""

    def __init__(self, read_ranges: Read, size: int) -> None:
        self._read_ranges, self._size, self._at = read_ranges, size, 0
        self._fetched: dict[tuple[int, int], bytes] = {}

    def prefetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Read ascending ranges, which the next calls of :meth:`read` return."""
        self._fetched = dict(zip(spans, self._read_ranges(spans), strict=True))

    def readable(self) -> bool:
        """Return True; so does :meth:`seekable`."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of other files."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """As of other files."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """As of other files."""
        span = self._at, self._size if size < 0 else min(self._size, self._at + size)
        self._at = span[1]
        return self._fetched.pop(span, None) or self._read_ranges([span])[0]


class ParquetTable:
    """Parquet files, such as those of all shards, as one table; caches row groups.

    Args:
        files: by name, for messages: paths, or functions that open a :class:`RangedFile`.
        schema: of the columns to read.
        advice: what to do about damaged files.
    """

    def __init__(
        self,
        files: Mapping[str, Path | Callable[[], RangedFile]],
        schema: pa.Schema,
        advice: str,
    ) -> None:
        self._files, self._schema, self._advice = files, schema, advice
        self._footers: dict[str, pq.FileMetaData] = {}
        self._group = lru_cache(CACHED_ROW_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return int(self._groups[0][-1])

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
            with self._opened(path) as (file, prefetch):
                for group in range(file.num_row_groups):
                    if group % GROUPS_AT_ONCE == 0:
                        prefetch(range(group, file.num_row_groups)[:GROUPS_AT_ONCE], (name,))
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
            with self._opened(path) as (file, _):
                for number in range(file.num_row_groups):
                    sizes.append(file.metadata.row_group(number).num_rows)
                    groups.append((path, number))
        return np.cumsum([0, *sizes]), groups

    def _read_group(self, path: str, group: int, names: tuple[str, ...]) -> pa.Table:
        with self._opened(path) as (file, prefetch):
            prefetch([group], names)
            return file.read_row_group(group, columns=[*names]).select(names).combine_chunks()

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[pq.ParquetFile, Callable[..., None]]]:
        """Open a file; the function fetches columns of row groups before they are read."""
        footer, source = self._footers.get(path), self._files[path]
        source = source if isinstance(source, Path) else source()
        options: dict[str, Any] = {"page_checksum_verification": True, "metadata": footer}
        options["pre_buffer"] = isinstance(source, Path)  # others are fetched by column
        try:
            with pq.ParquetFile(source, **options) as table:
                self._footers[path] = table.metadata
                yield table, partial(_prefetch, source, table.metadata)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise FormatError(f"{path} is damaged ({error}). {self._advice}") from error


def _prefetch(
    source: Path | RangedFile, footer: pq.FileMetaData, groups: Sequence[int], names: Sequence[str]
) -> None:
    if isinstance(source, Path):
        return
    numbers = [footer.schema.names.index(name) for name in names]
    spans = list[tuple[int, int]]()
    for chunk in (footer.row_group(group).column(n) for group in groups for n in numbers):
        start = first_byte(chunk)
        spans.append((start, start + chunk.total_compressed_size))
    source.prefetch(sorted(spans))


def first_byte(chunk: Any) -> int:
    """Return where a column of a row group starts in the file."""
    return min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
