"""The table of documents, a row group at a time: memory does not grow with the corpus."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus import layout
from prismlm.errors import FormatError

GROUPS_KEPT = 4


@dataclass(frozen=True, slots=True, eq=False)
class DocumentRows:
    """Some documents in ascending order.

    Attributes:
        numbers: which documents of the corpus, int64 [n].
        table: their rows, with the columns of ``documents-NNNNN.parquet``.
    """

    numbers: np.ndarray
    table: pa.Table


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    file: pq.ParquetFile
    ends: list[int]
    first_starts: list[int]


class DocumentTable:
    """Documents by number or by position. A row group that was read last is kept for the next."""

    def __init__(self, directory: Path, shards: Sequence[dict[str, int]]) -> None:
        self._directory = directory
        self._document_ends = list(accumulate(shard["documents"] for shard in shards))
        self._token_ends = list(accumulate(shard["tokens"] for shard in shards))
        self._open: tuple[int, _Shard] | None = None
        self._groups: dict[tuple[int, int], pa.Table] = {}

    def between(self, first: int, last: int) -> DocumentRows:
        """Return the documents that start at a position from ``first`` up to, without, ``last``.

        Raises:
            FormatError: a file is damaged.
        """
        numbers, tables = [np.empty(0, np.int64)], [layout.DOCUMENT_SCHEMA.empty_table()]
        shard = bisect.bisect_right(self._token_ends, first)
        while shard < len(self._token_ends) and _before(self._token_ends, shard) < last:
            opened = self._shard(shard)
            group = max(0, bisect.bisect_right(opened.first_starts, first) - 1)
            while group < len(opened.ends) and opened.first_starts[group] < last:
                table = self._group(shard, group)
                start = table["start"].to_numpy()
                low, high = np.searchsorted(start, [first, last])
                if high > low:
                    offset = _before(self._document_ends, shard) + _before(opened.ends, group)
                    numbers.append(np.arange(offset + low, offset + high))
                    tables.append(table.slice(low, high - low))
                group += 1
            shard += 1
        return DocumentRows(np.concatenate(numbers), pa.concat_tables(tables))

    def take(self, numbers: np.ndarray) -> pa.Table:
        """Return the rows of the documents ``numbers``, ascending, in that order.

        Raises:
            FormatError: a file is damaged.
        """
        tables = [layout.DOCUMENT_SCHEMA.empty_table()]
        done = 0
        while done < len(numbers):
            shard, group, offset = self._place(int(numbers[done]))
            table = self._group(shard, group)
            count = int(np.searchsorted(numbers[done:], offset + len(table)))
            tables.append(table.take(pa.array(numbers[done : done + count] - offset)))
            done += count
        return pa.concat_tables(tables)

    def extent(self, number: int) -> tuple[int, int]:
        """Return where a document starts and how many tokens it has.

        Raises:
            FormatError: a file is damaged.
        """
        shard, group, offset = self._place(number)
        table = self._group(shard, group)
        row = number - offset
        return table["start"][row].as_py(), table["length"][row].as_py()

    def _place(self, number: int) -> tuple[int, int, int]:
        shard = bisect.bisect_right(self._document_ends, number)
        first = _before(self._document_ends, shard)
        ends = self._shard(shard).ends
        group = bisect.bisect_right(ends, number - first)
        return shard, group, first + _before(ends, group)

    def _shard(self, number: int) -> _Shard:
        if self._open is None or self._open[0] != number:
            path = self._directory / layout.documents_file(number)
            try:
                file = pq.ParquetFile(path)
                meta = file.metadata
                groups = [meta.row_group(group) for group in range(meta.num_row_groups)]
                column = meta.schema.names.index("start")
                starts = [group.column(column).statistics.min for group in groups]
            except (pa.ArrowException, OSError, ValueError, AttributeError) as error:
                raise _damaged(path, error) from error
            ends = list(accumulate(group.num_rows for group in groups))
            expected = self._document_ends[number] - _before(self._document_ends, number)
            if (ends[-1] if ends else 0) != expected:
                raise _damaged(path, f"{ends[-1] if ends else 0} documents, expected {expected}")
            self._open = number, _Shard(file, ends, starts)
        return self._open[1]

    def _group(self, shard: int, group: int) -> pa.Table:
        key = shard, group
        if key not in self._groups:
            try:
                table = self._shard(shard).file.read_row_group(group)
                table = table.select(layout.DOCUMENT_SCHEMA.names)
            except (pa.ArrowException, OSError, KeyError) as error:
                raise _damaged(self._directory / layout.documents_file(shard), error) from error
            while len(self._groups) >= GROUPS_KEPT:
                del self._groups[next(iter(self._groups))]
            self._groups[key] = table.combine_chunks()
        return self._groups[key]


def _before(ends: list[int], index: int) -> int:
    return ends[index - 1] if index else 0


def _damaged(path: Path, why: object) -> FormatError:
    return FormatError(f"{path} is damaged ({why}). Build the corpus again.")
