"""Documents sampled by the hash of their ids, also from the parts of an input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prismlm.corpus.documents import Document
from prismlm.files import atomic_file

TRAINING_CHARACTERS = 64_000_000
SCHEMA = pa.schema(
    [
        ("key", pa.uint64()),
        ("number", pa.int64()),
        ("characters", pa.int64()),
        ("text", pa.large_string()),
    ]
)
# The first key that is not in a sample.
LIMIT = b"limit"
NO_LIMIT = 2**64


def sample_documents(documents: Iterable[Document], max_characters: int) -> list[Document]:
    """Choose documents of at most so many characters: those with the smallest hashes of their ids.

    Memory is bounded, all parts of the input are sampled alike and the sample is reproducible. It
    has at least one document.
    """
    return [document for _, _, document in _smallest(documents, max_characters)[0]]


def _smallest(
    documents: Iterable[Document], max_characters: int
) -> tuple[list[tuple[int, int, Document]], int]:
    """Return hash, number and document of a sample, and the smallest hash that is not in it."""
    heap, size, limit = list[tuple[int, int, Document]](), 0, NO_LIMIT
    for number, document in enumerate(documents):
        key = int.from_bytes(hashlib.sha256(document.doc_id.encode()).digest()[8:16], "little")
        if key >= limit:
            continue
        heappush(heap, (-key, number, document))
        size += len(document.text)
        while size > max_characters and len(heap) > 1:
            negative, _, dropped = heappop(heap)
            size -= len(dropped.text)
            limit = -negative
    rows = ((-negative, number, document) for negative, number, document in heap)
    return sorted(rows, key=itemgetter(1)), limit


def write_sample(documents: Iterable[Document], path: Path) -> None:
    """Write a sample of a part of the input, as Parquet."""
    rows, limit = _smallest(documents, TRAINING_CHARACTERS)
    rows.sort(key=itemgetter(0))
    columns = [
        [key for key, _, _ in rows],
        [number for _, number, _ in rows],
        [len(document.text) for _, _, document in rows],
        [document.text for _, _, document in rows],
    ]
    table = pa.table(columns, schema=SCHEMA.with_metadata({LIMIT: str(limit)}))
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, row_group_size=1000)


def read_samples(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the texts that one sample of all parts has, in order; others are not read."""
    tables = [pq.read_table(path, columns=["key", "characters"]) for path in paths]
    limits = [int((table.schema.metadata or {})[LIMIT]) for table in tables]
    sizes = pa.concat_tables(tables).sort_by("key")
    keys, fit = sizes["key"].to_numpy(), np.cumsum(sizes["characters"].to_numpy())
    count = max(1, int(np.searchsorted(fit, TRAINING_CHARACTERS, side="right")))
    limits += [int(keys[count])] if count < len(keys) else []
    last = pa.scalar(min(limits) - 1, pa.uint64())
    for path in paths:
        chosen = pq.read_table(path, filters=pc.field("key") <= last)
        yield from chosen.sort_by("number")["text"].to_pylist()
