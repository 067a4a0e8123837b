"""One file at a time, row by row: text, JSON, JSON lines (also compressed), CSV, Parquet, Arrow."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import IO, Any, AnyStr

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.documents import Columns
from prismlm.errors import BadRow, InputError, first_line
from prismlm.files import LARGEST_TEXT, decoded, not_utf8, read_text, too_large

WHOLE_FILES = (".txt", ".md")
EXTENSIONS = (
    *WHOLE_FILES,
    ".json",
    ".csv",
    *(f"{kind}{packing}" for kind in (".jsonl", ".ndjson") for packing in ("", ".gz", ".zst")),
    ".parquet",
    ".arrow",
)
_ROWS_AT_ONCE = 256
# Bytes of many texts that are held at once: a .json file, some rows of a table.
LARGEST_AT_ONCE = 2**30
# Text packs to a third or a fifth, what repeats itself to a fiftieth; of few bytes all is read.
LARGEST_RATIO, SMALL = 100, 2**25


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its number in the file from 1, the values by role, and how much is read.

    What cannot be read has the error in place of values.
    """

    number: int
    values: dict[str, Any] | BadRow
    bytes_read: int


def extension(path: Path) -> str | None:
    """Return the readable extension that ``path`` ends with, or None."""
    name = path.name.lower()
    return next((known for known in EXTENSIONS if name.endswith(known)), None)


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the rows of one file in order; nothing but one batch of rows is held in memory.

    Raises:
        BadRow: nothing of the file can be used: not UTF-8, or not valid JSON.
        InputError: the file is damaged, lacks a column, or is a CSV that is not UTF-8; holds a text
            or line of more than 128 MiB; or unpacks to what no text does.
    """
    kind = extension(path)
    try:
        if kind in WHOLE_FILES:
            yield Row(1, {"text": read_text(path)}, path.stat().st_size)
        elif kind == ".json":
            yield from _json_file(path, columns)
        elif kind == ".csv":
            yield from _csv_rows(path, columns)
        elif kind == ".parquet":
            yield from _parquet_rows(path, columns)
        elif kind == ".arrow":
            yield from _arrow_rows(path, columns)
        else:
            yield from _json_rows(path, columns)
    except UnicodeDecodeError as error:
        # Of a CSV file, some rows of which may have been read.
        raise InputError(str(not_utf8(error.object, str(path), error))) from error
    except csv.Error as error:
        raise InputError(f"{path} is not valid CSV ({error}). Write it again.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, pa.ArrowException) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        # Arrow reports broken zstd and Parquet streams as OSError without an errno.
        if error.errno is None:
            raise _damaged(path, error) from error
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is damaged or incomplete, or not what its extension says ({first_line(error)}). "
        "Fetch or write the file again."
    )


def _open_lines(path: Path, stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Return the raw file, whose position says how much is read, and its decompressed lines."""
    raw = stack.enter_context(path.open("rb"))
    if path.name.lower().endswith(".gz"):
        # gzip, not Arrow: it notices a missing end and checks the CRC.
        return raw, io.BufferedReader(stack.enter_context(gzip.GzipFile(fileobj=raw)), 1 << 16)
    if path.name.lower().endswith(".zst"):
        unpacked = stack.enter_context(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
        return raw, io.BufferedReader(unpacked, 1 << 16)  # pyright: ignore[reportArgumentType]
    return raw, raw


def _json_rows(path: Path, columns: Columns) -> Iterator[Row]:
    with ExitStack() as stack:
        raw, unpacked = _open_lines(path, stack)
        for number, line in enumerate(_lines(unpacked, path, raw), start=1):
            if line.isspace():
                continue
            where, expected = f"{path}:{number}", "one JSON object on each line"
            try:
                text = decoded(line, where).strip()
                if not text:
                    continue
                record = _parsed(text, where, expected)
            except BadRow as bad:
                yield Row(number, bad, raw.tell())
            else:
                yield Row(number, _values_of(record, where, columns, expected), raw.tell())


def _lines(stream: IO[AnyStr], path: Path, raw: IO[bytes]) -> Iterator[AnyStr]:
    """Yield lines, of which none is too long, and all not too many for what is read of ``raw``."""
    unpacked = 0
    for number in count(1):
        line = stream.readline(LARGEST_TEXT + 1)
        if not line:
            return
        if len(line) > LARGEST_TEXT:
            raise too_large(f"{path}:{number}")
        unpacked += len(line)
        if unpacked > SMALL:
            _check_ratio(path, unpacked, raw.tell())
        yield line


def _check_ratio(path: Path, unpacked: int, packed: int) -> None:
    """Raise InputError for what unpacks to a hundred times what it takes, and not little."""
    if unpacked > max(SMALL, LARGEST_RATIO * packed):
        raise InputError(
            f"{path} unpacks to more than {unpacked >> 20:,} MiB of {packed / 2**20:,.1f} MiB, as "
            f"no text does (at most {LARGEST_RATIO} times as much is read): leave it out, or give "
            "what it holds as it is."
        )


def _values_of(record: Any, where: str, columns: Columns, expected: str) -> dict[str, Any] | BadRow:
    if not isinstance(record, dict):
        kind = type(record).__name__
        return BadRow(f"{where} holds a JSON {kind}. Expected {expected}.", "not a JSON object")
    try:
        return {role: record[name] for role, name in columns.resolve(record, where).items()}
    except InputError as error:
        return BadRow(str(error), "a column is missing")


def _parsed(text: str, where: str, expected: str) -> Any:
    """Return a JSON value whose fractions are as they were written; ids are often such numbers."""
    try:
        return json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        message = f"{where} is not valid JSON ({error}). Expected {expected}."
        raise BadRow(message, "not valid JSON") from error


def _json_file(path: Path, columns: Columns) -> Iterator[Row]:
    if path.stat().st_size > LARGEST_AT_ONCE:
        raise InputError(
            f"{path} is larger than {LARGEST_AT_ONCE >> 20:,} MiB, and .json is read at once: "
            "write JSON lines (.jsonl), which are read one by one."
        )
    data, expected = path.read_bytes(), "an object or a list of objects"
    hint = f"{expected}; JSON lines are in a file called .jsonl"
    value = _parsed(decoded(data, str(path)), str(path), hint)
    records: list[Any] = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, start=1):
        values = _values_of(record, f"{path}:{number}", columns, expected)
        yield Row(number, values, len(data) * number // len(records))


def _csv_rows(path: Path, columns: Columns) -> Iterator[Row]:
    # A text may be longer than what the module reads of a field at first.
    csv.field_size_limit(LARGEST_TEXT)
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(_lines(lines, path, raw), strict=True)
        found = columns.resolve(rows.fieldnames or [], str(path))
        for number, record in enumerate(rows, start=1):
            values = {role: record[name] for role, name in found.items()}
            yield Row(number, values, raw.tell())


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Row]:
    with pq.ParquetFile(path) as table:
        found = columns.resolve(table.schema_arrow.names, str(path))
        named = sorted(set(found.values()))
        batches = table.iter_batches(_rows_at_once(table.metadata, named, path), columns=named)
        yield from _table_rows(batches, found, path, table.metadata.num_rows)


def _arrow_rows(path: Path, columns: Columns) -> Iterator[Row]:
    # What `datasets` saves are streams; Arrow files have the same extension.
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source).read_all()
        else:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
        found = columns.resolve(table.schema.names, str(path))
        batches = table.select(sorted(set(found.values()))).to_batches(_ROWS_AT_ONCE)
        yield from _table_rows(batches, found, path, table.num_rows)


def _table_rows(
    batches: Iterable[pa.RecordBatch], found: dict[str, str], path: Path, rows: int
) -> Iterator[Row]:
    size, number, unpacked = path.stat().st_size, 0, 0
    for batch in batches:
        lists = {role: _values(batch.column(name)) for role, name in found.items()}
        # A text that many rows refer to counts once in the batch.
        texts = (v for values in lists.values() for v in values if isinstance(v, str))
        unpacked += max(batch.nbytes, sum(map(len, texts)))
        _check_ratio(path, unpacked, size)
        for values in zip(*lists.values(), strict=True):
            number += 1
            yield Row(number, dict(zip(lists, values, strict=True)), size * number // rows)


def _rows_at_once(metadata: pq.FileMetaData, columns: list[str], path: Path) -> int:
    """Return how many rows are read at once: few where values may be large, as each may be all."""
    largest = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.partition(".")[0] in columns:
                _check_ratio(path, chunk.total_uncompressed_size, path.stat().st_size)
                largest = max(largest, chunk.total_uncompressed_size)
    return max(1, min(_ROWS_AT_ONCE, LARGEST_AT_ONCE // largest))


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_float32(column.type):
        # As a double 0.1 would be 0.10000000149; its own digits are in its text.
        column = column.cast(pa.string()).cast(pa.float64())
    return column.to_pylist()
