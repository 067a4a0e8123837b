"""What an audit would take, from reading a few of its texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.explain.audit import Audit
from prismlm.explain.audit_files import SCHEMA

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader


def estimate_audit(audit: Audit, reader: DocumentReader) -> Cost:
    """Read texts for some seconds and scale by the bytes that are left; nothing is written.

    The figures are ``texts``, ``tokens`` and ``tokens_per_second``; disk is of the rows as Parquet.

    Raises:
        InputError: there is nothing to read.
    """
    rows: list[dict[str, Any]] = []

    def read() -> Iterator[int]:
        for row in audit.read(reader):
            rows.append(row.to_dict())
            yield row.tokens

    rate = rate_of(read())
    scale = max(1.0, reader.total_bytes / max(1, reader.bytes_read))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd")
    tokens = round(audit.tokens * scale)
    return Cost(
        tokens / max(rate, 1e-9),
        # It does not grow with the number of texts.
        peak_memory(),
        round(sink.getvalue().size * scale),
        {"texts": round(audit.texts * scale), "tokens": tokens, "tokens_per_second": rate},
    )
