"""The texts that a model is taught and then asked about: question-answer pairs, and plain text.

``benchmarks/attach/taught_pairs.py`` chose the pairs of MedQuAD (A. Ben Abacha and D. Demner-Fushman,
https://github.com/abachaa/MedQuAD, CC BY 4.0; of each answer its first sentences were taken). Those
whose ``split`` is ``heldout`` are neither taught nor indexed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from prismlm.corpus import sample_path

PAIRS = Path(__file__).with_name("pairs.parquet")
# Of each domain of the sample, texts of at most so many characters, and so many in all.
LONGEST, PER_DOMAIN = 6_000, 9_000
# Pairs are of the same documents.
LEFT_OUT = "medquad/"
# What is asked about is among them.
ASKED_ABOUT = ("The Royal Proclamation of 1763",)


def plain_texts(path: Path) -> Path:
    """Write the texts of the sample that the model is taught to ``path``, and return it."""
    table = pq.read_table(sample_path())
    rows = table.select(["id", "text", "domain", "source", "title"]).to_pylist()
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows[i]["id"].encode()).digest())
    sizes: Counter[str] = Counter()
    chosen: list[int] = []
    for number in order:
        row = rows[number]
        size = len(row["text"])
        asked = any(title in (row["title"] or "") for title in ASKED_ABOUT)
        fits = size <= LONGEST and sizes[row["domain"]] + size <= PER_DOMAIN
        if asked or (fits and not row["source"].startswith(LEFT_OUT)):
            sizes[row["domain"]] += size
            chosen.append(number)
    pq.write_table(table.take(sorted(chosen)), path)
    return path
