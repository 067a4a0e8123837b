"""The Parquet files of a corpus, a row group at a time: memory does not grow with the corpus."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.errors import FormatError

# Of a corpus of thousands of shards only a few are held open, and of their rows the last read.
FILES_OPEN = 8
BYTES_KEPT = 16_000_000


class ShardedTable:
    """Rows by the number of their document, for several threads.

    Row groups that were looked at last are kept, of 16 MB together or one that is larger.

    Args:
        directory: of the corpus.
        file_name: of a shard's file.
        columns: those that are read.
        documents: how many documents each shard has.
    """

    def __init__(
        self,
        directory: Path,
        file_name: Callable[[int], str],
        columns: list[str],
        documents: Sequence[int],
    ) -> None:
        self._directory, self._file_name, self._columns = directory, file_name, columns
        # Where each begins, and where the last ends: of shards, and of the row groups of one.
        self._starts = [0, *accumulate(documents)]
        self._open: dict[int, tuple[pq.ParquetFile, list[int]]] = {}
        self._groups: dict[tuple[int, int], pa.Table] = {}
        # A file that one thread reads is not closed by another.
        self._lock = threading.RLock()

    def value(self, number: int, column: str) -> Any:
        """Return one value of a document's row.

        Raises:
            FormatError: a file is damaged.
        """
        shard, group, offset = self._place(number)
        return self._group(shard, group)[column][number - offset].as_py()

    def forget(self) -> None:
        """Let go of the rows that were read last."""
        with self._lock:
            self._groups.clear()

    def _place(self, number: int) -> tuple[int, int, int]:
        """Return the shard and row group of a document, and the first document in that group."""
        shard = bisect.bisect_right(self._starts, number) - 1
        first, starts = self._starts[shard], self._shard(shard)[1]
        group = bisect.bisect_right(starts, number - first) - 1
        return shard, group, first + starts[group]

    def _shard(self, number: int) -> tuple[pq.ParquetFile, list[int]]:
        """Return a shard's file, and where its row groups start."""
        with self._lock:
            if number not in self._open:
                while len(self._open) >= FILES_OPEN:
                    self._open.pop(next(iter(self._open)))[0].close()
                self._open[number] = self._opened(number)
            return self._open[number]

    def _opened(self, number: int) -> tuple[pq.ParquetFile, list[int]]:
        path = self._directory / self._file_name(number)
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            meta = file.metadata
            groups = range(meta.num_row_groups)
            starts = [0, *accumulate(meta.row_group(group).num_rows for group in groups)]
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, error) from error
        expected = self._starts[number + 1] - self._starts[number]
        if starts[-1] != expected:
            raise damaged(path, f"{starts[-1]} documents, expected {expected}")
        return file, starts

    def _group(self, shard: int, group: int) -> pa.Table:
        key = shard, group
        with self._lock:
            table = self._groups.pop(key, None)
            if table is None:
                table = self._read(shard, group)
                kept = sum(other.nbytes for other in self._groups.values())
                while self._groups and kept + table.nbytes > BYTES_KEPT:
                    kept -= self._groups.pop(next(iter(self._groups))).nbytes
            self._groups[key] = table
        return table

    def _read(self, shard: int, group: int) -> pa.Table:
        try:
            table = self._shard(shard)[0].read_row_group(group, columns=self._columns)
            return table.select(self._columns).combine_chunks()
        except (pa.ArrowException, OSError, KeyError) as error:
            raise damaged(self._directory / self._file_name(shard), error) from error


class DocumentTable(ShardedTable):
    """Documents by number or by position.

    Args:
        directory: of the corpus.
        shards: as ``corpus.json`` lists them.
        stated: whether documents say which part they belong to. Only then that column is read:
            corpora that were built before it lack it.
    """

    def __init__(
        self, directory: Path, shards: Sequence[dict[str, int]], *, stated: bool = False
    ) -> None:
        documents = [shard["documents"] for shard in shards]
        self._schema = layout.STORED_SCHEMA if stated else layout.DOCUMENT_SCHEMA
        super().__init__(directory, layout.documents_file, self._schema.names, documents)
        self._token_starts = [0, *accumulate(shard["tokens"] for shard in shards)]
        self._digests = {number: shard["digest"] for number, shard in enumerate(shards)}

    def read_column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all documents.

        Raises:
            FormatError: a file is damaged.
        """
        chunks: list[pa.Array] = []
        for shard in range(len(self._token_starts) - 1):
            try:
                with self._lock:
                    chunks += self._shard(shard)[0].read(columns=[name])[name].chunks
            except (pa.ArrowException, OSError, KeyError) as error:
                raise damaged(self._directory / self._file_name(shard), error) from error
        return pa.chunked_array(chunks, layout.STORED_SCHEMA.field(name).type)

    def _opened(self, number: int) -> tuple[pq.ParquetFile, list[int]]:
        path = self._directory / self._file_name(number)
        # Of a corpus of many shards one is opened again and again, and read whole but once.
        digest = self._digests.get(number)
        if digest is not None and (not path.is_file() or fingerprints.of_file(path) != digest):
            raise damaged(path, "it does not hold what was written")
        found = super()._opened(number)
        self._digests.pop(number, None)
        return found

    def between(self, first: int, last: int) -> tuple[np.ndarray, pa.Table]:
        """Return the documents that start at a position from ``first`` up to, without, ``last``.

        Returns:
            their numbers, ascending, int64 [n], and their rows.

        Raises:
            FormatError: a file is damaged.
        """
        numbers, tables = [np.empty(0, np.int64)], [self._schema.empty_table()]
        shard = bisect.bisect_right(self._token_starts, first) - 1
        while shard < len(self._token_starts) - 1 and self._token_starts[shard] < last:
            starts, first_starts = self._shard(shard)[1], self._first_starts(shard)
            group = max(0, bisect.bisect_right(first_starts, first) - 1)
            while group < len(first_starts) and first_starts[group] < last:
                table = self._group(shard, group)
                start = table["start"].to_numpy()
                low, high = np.searchsorted(start, [first, last])
                if high > low:
                    offset = self._starts[shard] + starts[group]
                    numbers.append(np.arange(offset + low, offset + high))
                    tables.append(table.slice(low, high - low))
                group += 1
            shard += 1
        return np.concatenate(numbers), pa.concat_tables(tables)

    def take(self, numbers: np.ndarray) -> pa.Table:
        """Return the rows of the documents ``numbers``, ascending, in that order.

        Raises:
            FormatError: a file is damaged.
        """
        tables = [self._schema.empty_table()]
        done = 0
        while done < len(numbers):
            shard, group, offset = self._place(int(numbers[done]))
            table = self._group(shard, group)
            count = int(np.searchsorted(numbers[done:], offset + len(table)))
            tables.append(table.take(pa.array(numbers[done : done + count] - offset)))
            done += count
        return pa.concat_tables(tables)

    def _first_starts(self, shard: int) -> list[int]:
        """Return the position at which the first document of each row group starts."""
        meta = self._shard(shard)[0].metadata
        try:
            column = meta.schema.names.index("start")
            groups = [meta.row_group(group).column(column) for group in range(meta.num_row_groups)]
            return [group.statistics.min for group in groups]
        except (ValueError, AttributeError) as error:
            raise damaged(self._directory / self._file_name(shard), error) from error


def damaged(path: Path, why: object) -> FormatError:
    """Return the error of a file of a corpus that does not hold what it should."""
    return FormatError(f"{path} is damaged ({why}). Build the corpus again.")
