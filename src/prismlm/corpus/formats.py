"""The rows of one file: text, JSON, JSON lines (also compressed), CSV, Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, AnyStr, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.documents import Columns
from prismlm.corpus.tables import first_byte
from prismlm.errors import BadRow, InputError, first_line
from prismlm.files import LARGEST_TEXT, decoded, read_text, too_large

WHOLE_FILES = (".txt", ".md")
# Files that parts share; the others belong to one part.
DIVISIBLE = (".jsonl", ".ndjson", ".parquet")
PACKED = (".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
EXTENSIONS = (*WHOLE_FILES, ".json", ".csv", *DIVISIBLE, *PACKED)
EXPECTED = f"Expected one of: {', '.join(EXTENSIONS)}."
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

    ``state`` is its size, and its time or the version that its store states, when it was listed.
    """

    path: Any
    name: str
    state: tuple[int, str]

    @classmethod
    def of(cls, path: Any, name: str | None = None) -> InputFile:
        """Return a file as it is now, or raise InputError."""
        if extension(path) is None:
            raise InputError(f"{path} does not have a supported extension. {EXPECTED}")
        try:
            return cls(path, name or path.name, _state(path))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error

    def absolute(self) -> InputFile:
        """Return it with a path that does not depend on the current directory."""
        return self if is_remote(self.path) else replace(self, path=self.path.absolute())

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.state[0]

    @property
    def kind(self) -> str:
        """Its extension."""
        return extension(self.path) or ""

    def open(self) -> Any:
        """Open it; files of stores have only part of the methods, such as readline(size)."""
        if is_remote(self.path):
            # This process may have asked the store long ago.
            self.path.fs.invalidate_cache()
        if _state(self.path) != self.state:
            raise InputError(
                f"{self.path} has changed since it was listed: put it back, or start over (corpus "
                "build: --overwrite; in Python: overwrite=True)."
            )
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
        with file.open() as opened:
            for number, record, done in _records(file, opened, columns, start, stop):
                doc_id = file.name if file.kind in WHOLE_FILES else f"{file.name}:{number}"
                yield Row(record, f"{path}:{number}", doc_id, source, max(0, done - start))
    except BadRow as bad:
        yield Row(bad, str(path), file.name, source, file.size - start)
    except InputError:
        raise
    except Exception as error:  # every format and every store has its own errors
        raise InputError(
            f"{path} cannot be read ({first_line(error)}). If it is damaged or incomplete, or not "
            "what its extension says, fetch or write it again; text as UTF-8."
        ) from error


def _records(
    file: InputFile, opened: Any, columns: Columns | None, start: int, stop: float
) -> Iterator[Numbered]:
    if file.kind in WHOLE_FILES:
        yield 1, read_text(str(file.path), opened), file.size
    elif file.kind == ".json":
        yield from _json(file, opened)
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
                yield number, _object(_parsed(text, where), where), done
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


def _parsed(text: str, where: str) -> Any:
    """Parse JSON, keeping the digits of decimals: ids are often such numbers."""
    try:
        return json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{where} is not valid JSON ({error}). Expected an object on each line of .jsonl, and "
            "an object or a list of objects in .json.",
            "not valid JSON",
        ) from error


def _object(record: Any, where: str) -> Record:
    if isinstance(record, dict):
        return record
    kind = type(record).__name__
    return BadRow(f"{where} holds a JSON {kind}. Expected an object.", "not a JSON object")


def _json(file: InputFile, raw: Any) -> Iterator[Numbered]:
    path, size = file.path, file.size
    if size > MAX_JSON:
        raise InputError(
            f"{path} is larger than {MAX_JSON >> 20:,} MiB, and .json is read as a whole: write "
            "JSON lines (.jsonl), which are read one by one."
        )
    value = _parsed(decoded(raw.read(), str(path)), str(path))
    records: list[Any] = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, start=1):
        yield number, _object(record, f"{path}:{number}"), size * number // len(records)


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
        firsts = [first_byte(group.column(0)) for group in groups]
        mine = [n for n, first in enumerate(firsts) if start <= first < stop]
        number = sum(group.num_rows for group in groups[: mine[0]]) if mine else 0
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=mine, columns=used):
            for record in batch.to_pylist():
                number += 1
                yield number, record, file.size * number // rows
