"""What an audit would take, from reading a few of its texts."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.explain.audit import Audit
from prismlm.explain.audit_files import SCHEMA

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader

SECONDS_MEASURED = 5.0
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class AuditEstimate:
    """Measured on the first texts and scaled by the bytes that are left to read.

    Attributes:
        texts, tokens: about how many there are.
        tokens_per_second: measured here.
        seconds: of the whole audit.
        memory_bytes: the most that this process held while it measured; it does not grow with the
            number of texts.
        disk_bytes: of the rows as Parquet.
    """

    texts: int
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_audit(audit: Audit, reader: DocumentReader) -> AuditEstimate:
    """Read texts for some seconds and scale; nothing is written.

    Raises:
        InputError: there is nothing to read.
    """
    began = time.monotonic()
    rows = []
    for row in audit.read(reader):
        rows.append(row.to_dict())
        if time.monotonic() - began > SECONDS_MEASURED:
            break
    seconds = time.monotonic() - began
    scale = max(1.0, reader.total_bytes / max(1, reader.bytes_read))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd")
    return AuditEstimate(
        texts=round(audit.texts * scale),
        tokens=round(audit.tokens * scale),
        tokens_per_second=audit.tokens / max(seconds, 1e-9),
        seconds=seconds * scale,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        disk_bytes=round(sink.getvalue().size * scale),
    )
