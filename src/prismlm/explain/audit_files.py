"""The files of an audit, all complete or none there: what they are, and what they would take."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.estimate import built, draw
from prismlm.corpus.layout import strings
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.errors import FormatError, InputError
from prismlm.files import json_text
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.outputs import output_files

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit

# Writes some rows of an audit.
Write = Callable[[list[dict[str, Any]]], object]
ROWS_AT_ONCE = 256
IDENTITY_KEY = b"prismlm.audit"
_SHARES = pa.list_(pa.struct([("key", pa.string()), ("share", pa.float64())]))
_DOCUMENTS = pa.list_(
    pa.struct(
        [
            ("doc_id", pa.string()),
            ("share", pa.float64()),
            *strings("source", "domain", "license", "title"),
            ("position", pa.int64()),
        ]
    )
)
SCHEMA = pa.schema(
    [
        *strings("text_id", "opening"),
        ("tokens", pa.int64()),
        ("predictions", pa.int64()),
        ("ce", pa.float64()),
        ("explained_share", pa.float64()),
        ("unattributed", pa.float64()),
        ("elsewhere", pa.float64()),
        ("support", pa.string()),
        ("support_score", pa.float64()),
        *[
            field
            for column in GROUP_COLUMNS
            for field in ((f"by_{column}", _SHARES), (f"other_{column}", pa.float64()))
        ],
        ("documents", _DOCUMENTS),
        ("other_documents", pa.float64()),
    ]
)
# A CSV has the same figures, and the largest share of each kind.
OWN = SCHEMA.names[: SCHEMA.names.index("support_score") + 1]
CSV_COLUMNS = [
    *OWN,
    *(f"top_{kind}{part}" for kind in (*GROUP_COLUMNS, "document") for part in ("", "_share")),
]


@contextmanager
def _parquet(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    schema = SCHEMA.with_metadata({IDENTITY_KEY: json_text(identity).encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))


@contextmanager
def _json_lines(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(json_text(row) + "\n" for row in rows)


@contextmanager
def _csv(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        yield lambda rows: writer.writerows([_cell(value) for value in _flat(row)] for row in rows)


FORMATS = {".parquet": _parquet, ".jsonl": _json_lines, ".csv": _csv}


def _flat(row: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of ``CSV_COLUMNS``."""
    yield from (row[name] for name in OWN)
    for largest in (*(row[f"by_{column}"][:1] for column in GROUP_COLUMNS), row["documents"][:1]):
        first = largest[0] if largest else {"share": None}
        yield first.get("key", first.get("doc_id"))
        yield first["share"]


def _cell(value: Any) -> Any:
    # A spreadsheet runs text that starts like a formula; a quote before it makes it text.
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


@contextmanager
def audit_files(
    paths: Sequence[Path], pages: Sequence[Path], identity: dict[str, str]
) -> Iterator[tuple[Callable[[dict[str, Any]], None], list[Path]]]:
    """Open files for rows, and temporary paths for pages, as :func:`prismlm.outputs.output_files`.

    Yielded are what takes a row, some hundred of which are written at a time, and the paths.

    Args:
        paths: of rows; the extension says the format: .parquet, .jsonl or .csv.
        pages: of files that the block itself writes.
        identity: what the rows were made with.
    """
    with output_files(*paths, *pages) as temporary, ExitStack() as writers:
        opened = [
            writers.enter_context(FORMATS[path.suffix.lower()](file, identity))
            for path, file in zip(paths, temporary, strict=False)
        ]
        held: list[dict[str, Any]] = []

        def add(row: dict[str, Any] | None, most: int = ROWS_AT_ONCE) -> None:
            held.extend([] if row is None else [row])
            if len(held) >= most:
                for write in opened:
                    write(held)
                held.clear()

        yield add, temporary[len(paths) :]
        add(None, most=1)


def read_audit(path: Path) -> tuple[dict[str, str], Iterator[dict[str, Any]]]:
    """Return what an audit's Parquet was made with, and its rows as a stream.

    Raises:
        InputError: there is no such file.
        FormatError: it is damaged, or not an audit.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file: expected the Parquet of `prismlm audit`.")
    with _readable(path):
        schema = pq.read_schema(path)
    if IDENTITY_KEY not in (schema.metadata or {}) or not schema.equals(SCHEMA):
        raise FormatError(
            f"{path} is not the Parquet of `prismlm audit` of this version. Run the audit again."
        )
    with _readable(path):
        return json.loads(schema.metadata[IDENTITY_KEY]), _rows(path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with _readable(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read ({error}). Run the audit again.") from error


def estimate_audit(audit: Audit, reader: DocumentReader) -> Cost:
    """Audit some of the texts for some seconds, and multiply; nothing is written.

    The figures are ``texts``, ``tokens`` and ``tokens_per_second``; disk is of the rows as Parquet.

    Raises:
        InputError: there is nothing to read.
    """
    sample, rows = draw(reader), list[dict[str, Any]]()
    assert sample.scale is not None
    assert sample.num_documents is not None

    def read() -> Iterator[int]:
        for row in audit.read(sample.documents):
            rows.append(row.to_dict())
            yield row.tokens

    rate = rate_of(read())
    with built(sample, reader.tokenizer, 0.0) as corpus:  # pyright: ignore[reportArgumentType]
        tokens = sample.scale * (corpus.num_tokens - len(sample.documents))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd")
    return Cost(
        tokens / max(rate, 1e-9),
        # It does not grow with the number of texts.
        peak_memory(),
        round(sink.getvalue().size * sample.num_documents / len(rows)),
        {
            "texts": sample.num_documents,
            "tokens": round(tokens),
            "tokens_per_second": rate,
        },
        basis=f"Measured on {len(rows):,} of the texts.",
    )
