"""The rows of one file: text, JSON, JSON lines (also compressed), CSV, Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import IO, Any, AnyStr, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.documents import Columns
from prismlm.corpus.tables import first_byte
from prismlm.errors import BadRow, InputError, first_line
from prismlm.files import LARGEST_TEXT, decoded, not_utf8, read_text, too_large

WHOLE_FILES = (".txt", ".md")
# Files that parts share; the others belong to one part.
DIVISIBLE = (".jsonl", ".ndjson", ".parquet")
PACKED = (".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
EXTENSIONS = (*WHOLE_FILES, ".json", ".csv", *DIVISIBLE, *PACKED)
# What stores say of the version of a file.
VERSIONS = ("ETag", "etag", "generation", "blob_id", "mtime", "created", "last_modified")
ROWS_AT_ONCE = 64
# A .json file is parsed as a whole.
MAX_JSON = 2**30
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

    def as_listed(self) -> InputFile:
        """Return it as it is now, for another process and current directory."""
        path = self.path if is_remote(self.path) else self.path.absolute()
        return InputFile(path, self.name, self.state)

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.state[0]

    @property
    def kind(self) -> str:
        """Its readable extension, or ""."""
        return extension(self.path) or ""

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

    def open(self) -> Any:
        """Open it; files of stores have only part of the methods, such as readline(size)."""
        file: Any = self.path.open("rb")
        return io.BufferedReader(file, 1 << 20) if is_remote(self.path) else file


def _state(path: Any) -> tuple[int, str]:
    if not is_remote(path):
        status = path.stat()
        return status.st_size, str(status.st_mtime_ns)
    info = path.fs.info(path.path)
    return info["size"], next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def is_remote(path: Any) -> bool:
    """Return whether a path is a UPath of a store, which has a file system of fsspec."""
    return not isinstance(path, os.PathLike) and hasattr(path, "fs")


def extension(path: Path) -> str | None:
    """Return the readable extension that ``path`` ends with, or None."""
    name = path.name.lower()
    return next((known for known in EXTENSIONS if name.endswith(known)), None)


Record = dict[str, Any] | str | BadRow
# A record with its number in the file, and the bytes read.
Numbered = tuple[int | str, Record, int]


class Row(NamedTuple):
    """One record.

    Attributes:
        record: values by column, the text of a whole file, or what is wrong with the record.
        location: for messages.
        doc_id, source: of the document, unless the record has them.
        done: how much of the input has been read so far.
    """

    record: Record
    location: str
    doc_id: str
    source: str
    done: int


def read_rows(
    file: InputFile, columns: Columns | None = None, start: int = 0, stop: float = math.inf
) -> Iterator[Row]:
    """Yield the rows of one file, in order, a batch of them at a time.

    Of divisible files, those whose first byte lies in [start, stop); a negative start says how
    much was read before the file. A file that is not UTF-8, or not valid JSON as a whole, is one
    bad row. Rows are numbered from 1; in large files of JSON lines, ``@`` and the offset of the
    line stand for the number. Tables must have the named ``columns``; others are not read.
    """
    path, source = file.path, file.path.name[: -len(file.kind)]
    try:
        file.check()
        for number, record, done in _records(file, columns, start, stop):
            doc_id = file.name if file.kind in WHOLE_FILES else f"{file.name}:{number}"
            yield Row(record, f"{path}:{number}", doc_id, source, max(0, done - start))
    except BadRow as bad:
        yield Row(bad, str(path), file.name, source, file.size - start)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        # A CSV file; some of its rows may have been read.
        raise InputError(str(not_utf8(error.object, str(path), error))) from error
    except csv.Error as error:
        raise InputError(f"{path} is not valid CSV ({error}). Write it again.") from error
    except Exception as error:
        why = first_line(error)
        # Arrow reports broken zstd and Parquet streams as OSError without an errno, as gzip does.
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) is not None:
            why = f"cannot be read: {getattr(error, 'strerror', None) or 'it is missing'}."
        elif isinstance(error, (EOFError, zlib.error, OSError, pa.ArrowException)):
            why = (
                f"is damaged or incomplete, or not what its extension says ({why}). Fetch or write "
                "the file again."
            )
        elif is_remote(path):  # each store has its own errors
            why = f"could not be read to its end ({why}). Try again when its store answers."
        else:
            raise
        raise InputError(f"{path} {why}") from error


def _records(
    file: InputFile, columns: Columns | None, start: int, stop: float
) -> Iterator[Numbered]:
    if file.kind == ".json":
        yield from _json(file)
        return
    with file.open() as opened:
        if file.kind in WHOLE_FILES:
            yield 1, read_text(str(file.path), opened), file.size
        elif file.kind == ".csv":
            yield from _csv(file, opened, columns)
        elif file.kind == ".parquet":
            yield from _parquet(file, opened, columns, start, stop)
        else:
            yield from _json_lines(file, opened, start, stop)


def _json_lines(file: InputFile, raw: Any, start: int, stop: float) -> Iterator[Numbered]:
    is_packed = file.kind in PACKED
    counted = file.size <= MAX_COUNTED or is_packed
    first = _first_line(raw, start, counted=counted) if start > 0 else 1
    offset = raw.tell()
    for count, line in enumerate(_lines(_unpacked(raw, file.kind), file.path, first), start=first):
        if offset >= stop:
            return
        number = count if counted else f"@{offset}"
        offset += len(line)
        # Of a compressed file, the compressed bytes.
        done = raw.tell() if is_packed else offset
        where = f"{file.path}:{number}"
        try:
            text = decoded(line, where).strip()
            if text:
                record = _parsed(text, where, "one JSON object on each line")
                yield number, _checked(record, where), done
        except BadRow as bad:
            yield number, bad, done


def _unpacked(raw: Any, kind: str) -> Any:
    if kind.endswith(".gz"):
        # gzip, not Arrow: it notices a missing end and checks the CRC.
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 16)
    if kind.endswith(".zst"):
        unpacked: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(unpacked, 1 << 16)
    return raw


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


def _checked(record: Any, where: str) -> Record:
    if isinstance(record, dict):
        return record
    return BadRow(
        f"{where} holds a JSON {type(record).__name__}. Expected one JSON object on each line, or "
        "a list of objects in a .json file.",
        "not a JSON object",
    )


def _json(file: InputFile) -> Iterator[Numbered]:
    path, size = file.path, file.size
    if size > MAX_JSON:
        raise InputError(
            f"{path} is larger than {MAX_JSON >> 20:,} MiB, and .json is read as a whole: write "
            "JSON lines (.jsonl), which are read one by one."
        )
    hint = "an object or a list of objects; JSON lines are in a file called .jsonl"
    value = _parsed(decoded(path.read_bytes(), str(path)), str(path), hint)
    records: list[Any] = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, start=1):
        yield number, _checked(record, f"{path}:{number}"), size * number // len(records)


def _csv(file: InputFile, raw: Any, columns: Columns | None) -> Iterator[Numbered]:
    # The default limit is 128 KB.
    csv.field_size_limit(LARGEST_TEXT)
    with io.TextIOWrapper(raw, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(_lines(lines, file.path), strict=True)
        if columns is not None:
            columns.resolve(rows.fieldnames or [], str(file.path))
        for number, values in enumerate(rows, start=1):
            record: Record = values
            if None in values:
                record = BadRow(
                    f"{file.path}:{number} has more values than the header has columns. Put texts "
                    "with commas in double quotes.",
                    "more values than columns",
                )
            yield number, record, raw.tell()


def _parquet(
    file: InputFile, raw: Any, columns: Columns | None, start: int, stop: float
) -> Iterator[Numbered]:
    with pq.ParquetFile(raw) as table:
        used, rows = table.schema_arrow.names, table.metadata.num_rows
        if columns is not None:
            used = sorted({*columns.resolve(used, str(file.path)).values()})
        groups = [table.metadata.row_group(n) for n in range(table.num_row_groups)]
        chunks = (group.column(n) for group in groups for n in range(group.num_columns))
        sizes = (
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema.split(".")[0] in used
        )
        # A single row may be as large as all of its column.
        at_once = max(1, min(ROWS_AT_ONCE, MAX_JSON // max([1, *sizes])))
        firsts = [first_byte(group.column(0)) for group in groups]
        mine = [n for n, first in enumerate(firsts) if start <= first < stop]
        number = sum(group.num_rows for group in groups[: mine[0]]) if mine else 0
        for batch in table.iter_batches(at_once, row_groups=mine, columns=used) if mine else ():
            for record in batch.to_pylist():
                number += 1
                yield number, record, file.size * number // rows
