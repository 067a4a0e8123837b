"""The closed shards of a corpus that is still being built, read again document by document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus import layout
from prismlm.corpus.documents import METADATA, Document
from prismlm.errors import FormatError

_ROWS_AT_ONCE = 64


def read_shard(
    directory: Path, number: int, shard: dict[str, Any], dtype: np.dtype[Any]
) -> Iterator[tuple[Document, bytes]]:
    """Yield each document of a shard with its tokens, as they were written.

    Args:
        directory: where the shard is.
        number: which one.
        shard: its ``documents``, ``tokens`` and ``files``, as ``corpus.json`` lists them.
        dtype: of a token.

    Raises:
        FormatError: a file is missing, was cut off or is damaged.
    """
    for name, size in shard["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise _damaged(directory, f"{name} is missing or not of {size} bytes")
    try:
        yield from _documents(directory, number, dtype)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(directory, str(error)) from error


def _documents(
    directory: Path, number: int, dtype: np.dtype[Any]
) -> Iterator[tuple[Document, bytes]]:
    rows = _rows(directory / layout.documents_file(number))
    texts = _rows(directory / layout.text_file(number))
    with (directory / layout.tokens_file(number)).open("rb") as tokens:
        for row, text in zip(rows, texts, strict=True):
            metadata = {name: row[name] for name in METADATA}
            document = Document(row["doc_id"], text["text"], **metadata)
            yield document, tokens.read(row["length"] * dtype.itemsize)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as table:
        for batch in table.iter_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _damaged(directory: Path, why: str) -> FormatError:
    return FormatError(
        f"what an interrupted build left in {directory} is damaged ({why}). Remove it, and the "
        "same command starts anew."
    )
