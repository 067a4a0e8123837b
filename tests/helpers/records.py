from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus import sample_path

WORDS = "the model reads a window of tokens and predicts which one follows".split()  # noqa: SIM905

RECORDS: list[dict[str, Any]] = [
    {"id": "plain", "text": "The heart pumps blood.", "domain": "medicine", "license": "CC0"},
    {"id": "accents", "text": "Żółć – naïve café 🙂👩‍👩‍👧 漢字\n", "domain": "language"},
    {"id": "marker", "text": "It ends with <|endoftext|> in the middle.", "title": "Marker"},
    {"id": "spaces", "text": "  two\t\ttabs   and\r\n\r\nlines  ", "source": "typed", "url": "x:y"},
    {"id": "one", "text": "a", "domain": "medicine"},
    *(
        {
            "id": f"long-{n}",
            "text": " ".join(WORDS[(n * 7 + i * i) % len(WORDS)] for i in range(40 + 90 * n)),
            "domain": "computing",
            "license": "MIT",
        }
        for n in range(12)
    ),
]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def sample_starts(count: int, characters: int, every: int = 1) -> pa.Table:
    """Return the starts of ``count`` documents from all over the bundled sample, or fewer."""
    table = pq.read_table(sample_path())
    rows = table.take(list(range(0, len(table), every * (len(table) // count)))).to_pylist()
    cut = [row | {"text": row["text"][:characters]} for row in rows]
    return pa.Table.from_pylist(cut, schema=table.schema)
