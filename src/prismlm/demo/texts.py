"""The texts of the demo's model: question-answer pairs, and some of the bundled sample.

``benchmarks/corpus/demo_pairs.py`` (in the history, commit e3ded294) chose the pairs. Those whose
``split`` is ``heldout`` were neither trained on nor indexed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from importlib.resources import as_file, files
from pathlib import Path

import pyarrow.parquet as pq

from prismlm.corpus import sample_path
from prismlm.lens.cells import Cells

PAIRS = "pairs.parquet"
# Characters of a text of the sample at most, and of all texts of a domain.
LONGEST, PER_DOMAIN = 6_000, 9_000
# Pairs are of the same documents.
LEFT_OUT = "medquad/"
# What the demo asks about is among them.
ASKED_ABOUT = ("The Royal Proclamation of 1763",)


def pairs_path() -> Path:
    """Return the Parquet file of the question-answer pairs, a chat each."""
    with as_file(files("prismlm.demo").joinpath("shipped", PAIRS)) as path:
        return path


def plain_texts(path: Path) -> Path:
    """Write the texts of the sample that the model was fine-tuned on to ``path``; return it."""
    table = pq.read_table(sample_path())
    rows = table.select(["id", "text", "domain", "source", "title"]).to_pylist()
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows[i]["id"].encode()).digest())
    sizes: Counter[str] = Counter()
    chosen: list[int] = []
    for number in order:
        row, size = rows[number], len(rows[number]["text"])
        asked = any(title in (row["title"] or "") for title in ASKED_ABOUT)
        fits = size <= LONGEST and sizes[row["domain"]] + size <= PER_DOMAIN
        if asked or (fits and not row["source"].startswith(LEFT_OUT)):
            sizes[row["domain"]] += size
            chosen.append(number)
    pq.write_table(table.take(sorted(chosen)), path)
    return path


def documents(path: Path, every: int) -> Path:
    """Return the bundled sample, or write one in ``every`` of its documents to ``path``."""
    if every == 1:
        return sample_path()
    pq.write_table(pq.read_table(sample_path())[::every], path)
    return path


def holds_pairs(cells: Cells) -> bool:
    """Return whether the pairs are among the documents of a lens."""
    first = pq.read_table(pairs_path(), columns=["id"])["id"][0].as_py()
    return cells.document_number(first) >= 0
