"""Pairs of a sentence and a changed one, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from prismlm.corpus.layout import strings
from prismlm.errors import FormatError, InputError, shown
from prismlm.eval.runs import read_columns, sample_rows

# Changes that keep the meaning, and changes of it.
SLICES = (
    "synonym", "typo", "spelling", "morphology", "contraction", "punctuation", "abbreviation",
)  # fmt: skip
INTERVENTIONS = ("gender", "negation", "number")
COLUMNS = pa.schema(
    [
        *strings("id", "slice", "original", "perturbed", "source"),
        ("similarity", pa.float32()),
        ("distance", pa.int32()),
    ]
)
WAY_OUT = "Write the pairs again with `prismlm eval pairs`."


class Pair(NamedTuple):
    """A text and its changed form."""

    id: str
    slice: str
    original: str
    perturbed: str


def read_pairs(path: Path, limit: int | None = None, seed: int = 0) -> list[Pair]:
    """Return the pairs of a Parquet file, or ``limit`` of each slice drawn by ``seed``.

    They come slice by slice, in the order of ``SLICES`` and ``INTERVENTIONS``.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file: expected pairs in Parquet. {WAY_OUT}")
    columns = ", ".join(Pair._fields)
    table = read_columns(path, Pair._fields, f"{columns}. {WAY_OUT}".removesuffix("."))
    rows = [Pair(**row) for row in table.select(Pair._fields).to_pylist()]
    by_slice: dict[str, list[Pair]] = {name: [] for name in (*SLICES, *INTERVENTIONS)}
    for number, row in enumerate(rows):
        if not all(isinstance(value, str) for value in row) or row.slice not in by_slice:
            raise FormatError(
                f"row {number} of {path} is {shown(tuple(row))}: expected {columns} as text, and "
                f"one of the slices {', '.join(by_slice)}. {WAY_OUT}"
            )
        by_slice[row.slice].append(row)
    return [
        members[number]
        for members in by_slice.values()
        for number in sample_rows(len(members), limit, seed)
    ]
