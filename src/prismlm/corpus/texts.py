"""The texts of a corpus: one document costs one row group of at most a megabyte."""

from __future__ import annotations

import bisect
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus import layout
from prismlm.errors import FormatError

FILES_OPEN = 8


class TextReader:
    """Reads the text of one document at a time; the last row group is kept for its neighbours."""

    def __init__(self, directory: Path, documents_per_shard: list[int]) -> None:
        self._directory = directory
        self._shard_ends = list(accumulate(documents_per_shard))
        self._tables: dict[int, tuple[pq.ParquetFile, list[int]]] = {}
        self._cached: tuple[int, int] | None = None
        self._texts = pa.chunked_array([], pa.large_string())

    def read(self, index: int) -> str:
        """Return the text of the document with this number.

        Raises:
            FormatError: the file is damaged.
        """
        shard = bisect.bisect_right(self._shard_ends, index)
        row = index - (self._shard_ends[shard - 1] if shard else 0)
        try:
            table, group_ends = self._open(shard)
            group = bisect.bisect_right(group_ends, row)
            if self._cached != (shard, group):
                self._texts = table.read_row_group(group, columns=["text"])["text"]
                self._cached = (shard, group)
            return self._texts[row - (group_ends[group - 1] if group else 0)].as_py()
        except (pa.ArrowException, OSError, IndexError) as error:
            path = self._directory / layout.text_file(shard)
            raise FormatError(f"{path} is damaged ({error}). Build the corpus again.") from error

    def _open(self, shard: int) -> tuple[pq.ParquetFile, list[int]]:
        if shard not in self._tables:
            # Of a corpus of thousands of shards only a few are held open.
            while len(self._tables) >= FILES_OPEN:
                self._tables.pop(next(iter(self._tables)))[0].close()
            table = pq.ParquetFile(self._directory / layout.text_file(shard))
            groups = range(table.metadata.num_row_groups)
            ends = list(accumulate(table.metadata.row_group(group).num_rows for group in groups))
            self._tables[shard] = table, ends
        return self._tables[shard]
