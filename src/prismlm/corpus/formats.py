"""The rows of one file: text, JSON, JSON lines (also compressed), CSV, Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, AnyStr, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.documents import Columns
from prismlm.corpus.tables import first_byte
from prismlm.errors import BadRow, InputError, first_line
from prismlm.files import LARGEST_TEXT, decoded, not_utf8, read_text, too_large

WHOLE_FILES = (".txt", ".md")
PACKINGS = ("", ".gz", ".zst")
LINES = tuple(f"{kind}{packing}" for kind in (".jsonl", ".ndjson") for packing in PACKINGS)
EXTENSIONS = (*WHOLE_FILES, ".json", ".csv", *LINES, ".parquet")
# What stores say of the version of a file.
VERSIONS = ("ETag", "etag", "generation", "blob_id", "mtime", "created", "last_modified")
ROWS_AT_ONCE = 64
# A .json file is parsed as a whole.
MAX_JSON = 2**30
# Files that parts share; the others belong to one part.
DIVISIBLE = (".jsonl", ".ndjson", ".parquet")
# Up to this size the lines before a part are counted, to number its own.
MAX_COUNTED = 2**30


@dataclass(frozen=True)
class InputFile:
    """A file to read; without an id column, ids are made of ``name``.

    ``listed`` is its state when a build was started, if another process made the list.
    """

    path: Path
    name: str
    listed: tuple[int, str] | None = None

    @cached_property
    def state(self) -> tuple[int, str]:
        """Its bytes, and the version that its store states; a store is asked once."""
        return self.listed or _state(self.path)

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.state[0]

    def check(self) -> None:
        """Raise InputError if it is no longer as it was listed."""
        if self.listed is None:
            return
        if is_remote(self.path):
            # This process may have asked the store long ago.
            self.path.fs.invalidate_cache()  # pyright: ignore[reportAttributeAccessIssue]
        now = _state(self.path)
        if now != self.listed:
            raise InputError(
                f"{self.path} has changed since the build started: {self.listed[0]:,} bytes of "
                f"version {self.listed[1] or 'unknown'} then, {now[0]:,} of {now[1]} now. Put it "
                "back, or start over with --overwrite (in Python: overwrite=True)."
            )


def _state(path: Any) -> tuple[int, str]:
    if isinstance(path, Path):
        status = path.stat()
        return status.st_size, str(status.st_mtime_ns)
    info = path.fs.info(path.path)
    return info["size"], next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def is_remote(path: Any) -> bool:
    """Return whether a path is a UPath of a store, which has a file system of fsspec."""
    return not isinstance(path, os.PathLike) and hasattr(path, "fs")


class Span(NamedTuple):
    """The records of a file whose first byte lies in [start, stop)."""

    start: int = 0
    stop: float = math.inf


WHOLE = Span()


class Row(NamedTuple):
    """One record: its number in the file from 1, its values by role or the error, bytes read.

    In large files of JSON lines, ``@`` and the offset of its line stand for the number.
    """

    number: int | str
    values: dict[str, Any] | BadRow
    bytes_read: int


def extension(path: Path) -> str | None:
    """Return the readable extension that ``path`` ends with, or None."""
    name = path.name.lower()
    return next((known for known in EXTENSIONS if name.endswith(known)), None)


def read_rows(file: InputFile, columns: Columns, span: Span = WHOLE) -> Iterator[Row]:
    """Yield the rows of one file, in order, a batch of them at a time.

    Only divisible files have a ``span``. Raises BadRow for a file that is not UTF-8 or not valid
    JSON as a whole.
    """
    readers = {".json": _json, ".csv": _csv} | dict.fromkeys(WHOLE_FILES, _whole)
    path, kind = file.path, extension(file.path) or ""
    parts = partial(_parquet if kind == ".parquet" else _json_lines, span=span)
    try:
        file.check()
        yield from readers.get(kind, parts)(path, columns, file.size)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        # A CSV file; some of its rows may have been read.
        raise InputError(str(not_utf8(error.object, str(path), error))) from error
    except csv.Error as error:
        raise InputError(f"{path} is not valid CSV ({error}). Write it again.") from error
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        # Arrow reports broken zstd and Parquet streams as OSError without an errno, as gzip does.
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) is not None:
            why = getattr(error, "strerror", None) or "it is missing"
            raise InputError(f"{path} cannot be read: {why}.") from error
        raise InputError(
            f"{path} is damaged or incomplete, or not what its extension says "
            f"({first_line(error)}). Fetch or write the file again."
        ) from error
    except Exception as error:  # each store has its own errors
        if isinstance(path, Path):
            raise
        raise InputError(
            f"{path} could not be read to its end ({first_line(error)}). Try again when its store "
            "answers."
        ) from error


def _opened(path: Path) -> Any:
    """Open a file; those of stores have only part of the methods, such as readline(size)."""
    file: Any = path.open("rb")
    return file if isinstance(path, Path) else io.BufferedReader(file, 1 << 20)


def _whole(path: Path, columns: Columns, size: int) -> Iterator[Row]:
    with _opened(path) as file:
        yield Row(1, {"text": read_text(str(path), file)}, size)


def _json_lines(path: Path, columns: Columns, size: int, span: Span) -> Iterator[Row]:
    with ExitStack() as stack:
        # Progress is the position in the compressed file.
        raw = stack.enter_context(_opened(path))
        stream: Any = raw
        is_packed = extension(path) not in DIVISIBLE
        counted = size <= MAX_COUNTED or is_packed
        first = _first_line(raw, span.start, counted=counted) if span.start else 1
        offset = raw.tell()
        if path.name.lower().endswith(".gz"):
            # gzip, not Arrow: it notices a missing end and checks the CRC.
            stream = io.BufferedReader(stack.enter_context(gzip.GzipFile(fileobj=raw)), 1 << 16)
        elif path.name.lower().endswith(".zst"):
            unpacked: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
            stream = io.BufferedReader(stack.enter_context(unpacked), 1 << 16)
        for count, line in enumerate(_lines(stream, path, first), start=first):
            if offset >= span.stop:
                return
            number = count if counted else f"@{offset}"
            offset += len(line)
            done = raw.tell() if is_packed else offset
            where = f"{path}:{number}"
            try:
                text = decoded(line, where).strip()
                record = _parsed(text, where, "one JSON object on each line") if text else None
            except BadRow as bad:
                yield Row(number, bad, done)
                continue
            if text:
                yield Row(number, _values(record, where, columns), done)


def _first_line(raw: IO[bytes], start: int, *, counted: bool) -> int:
    """Move to the first line from ``start`` on, and return its number if they are counted."""
    number, left = 2, start - 1
    if not counted:
        raw.seek(left)
    while counted and (block := raw.read(min(left, 1 << 20))):
        number += block.count(b"\n")
        left -= len(block)
    while (rest := raw.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass
    return number


def _lines(stream: IO[AnyStr], path: Path, first: int = 1) -> Iterator[AnyStr]:
    lines = iter(lambda: stream.readline(LARGEST_TEXT + 1), stream.read(0))
    for number, line in enumerate(lines, start=first):
        if len(line) > LARGEST_TEXT:
            raise too_large(f"{path}:{number}")
        yield line


def _parsed(text: str, where: str, expected: str) -> Any:
    """Parse JSON, keeping the digits of decimals: ids are often such numbers."""
    try:
        return json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        message = f"{where} is not valid JSON ({error}). Expected {expected}."
        raise BadRow(message, "not valid JSON") from error


def _values(record: Any, where: str, columns: Columns) -> dict[str, Any] | BadRow:
    """Return the values of a JSON record by role."""
    if not isinstance(record, dict):
        message = (
            f"{where} holds a JSON {type(record).__name__}. Expected one JSON object on each line, "
            "or a list of objects in a .json file."
        )
        return BadRow(message, "not a JSON object")
    try:
        return {role: record[name] for role, name in columns.resolve(record, where).items()}
    except InputError as error:
        return BadRow(str(error), "a column is missing")


def _json(path: Path, columns: Columns, size: int) -> Iterator[Row]:
    if size > MAX_JSON:
        raise InputError(
            f"{path} is larger than {MAX_JSON >> 20:,} MiB, and .json is read as a whole: write "
            "JSON lines (.jsonl), which are read one by one."
        )
    hint = "an object or a list of objects; JSON lines are in a file called .jsonl"
    value = _parsed(decoded(path.read_bytes(), str(path)), str(path), hint)
    records: list[Any] = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, start=1):
        values = _values(record, f"{path}:{number}", columns)
        yield Row(number, values, size * number // len(records))


def _csv(path: Path, columns: Columns, size: int) -> Iterator[Row]:
    # The default limit is 128 KB.
    csv.field_size_limit(LARGEST_TEXT)
    with _opened(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(_lines(lines, path), strict=True)
        names = columns.resolve(rows.fieldnames or [], str(path))
        for number, record in enumerate(rows, start=1):
            values: dict[str, Any] | BadRow = {role: record[names[role]] for role in names}
            if None in record:
                message = (
                    f"{path}:{number} has more values than the header has columns. Put texts with "
                    "commas in double quotes."
                )
                values = BadRow(message, "more values than columns")
            yield Row(number, values, raw.tell())


def _parquet(path: Path, columns: Columns, size: int, span: Span) -> Iterator[Row]:
    with _opened(path) as file, pq.ParquetFile(file) as table:
        metadata, names = table.metadata, columns.resolve(table.schema_arrow.names, str(path))
        used = sorted(set(names.values()))
        groups = list(map(metadata.row_group, range(metadata.num_row_groups)))
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        chunks = (chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in used)
        largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        # A single row may be as large as all of its column.
        at_once = max(1, min(ROWS_AT_ONCE, MAX_JSON // max(1, largest)))
        mine = [
            n
            for n, group in enumerate(groups)
            if span.start <= first_byte(group.column(0)) < span.stop
        ]
        if mine:
            before = sum(group.num_rows for group in groups[: mine[0]])
            batches = table.iter_batches(at_once, row_groups=mine, columns=used)
            yield from _table_rows(batches, names, size, metadata.num_rows, before)


def _table_rows(
    batches: Iterable[pa.RecordBatch], names: dict[str, str], size: int, rows: int, before: int = 0
) -> Iterator[Row]:
    number = before
    for batch in batches:
        lists = [batch.column(name).to_pylist() for name in names.values()]
        for values in zip(*lists, strict=True):
            number += 1
            yield Row(number, dict(zip(names, values, strict=True)), size * number // rows)
