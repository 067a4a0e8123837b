"""Pairs of a sentence and a changed one, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.layout import strings
from prismlm.errors import FormatError, InputError
from prismlm.eval.benchmarks import drawn

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
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"{path} does not hold pairs in Parquet: {error}. {WAY_OUT}") from error
    missing = [name for name in Pair._fields if name not in table.column_names]
    if missing:
        raise FormatError(f"{path} has no column {', '.join(missing)}. {WAY_OUT}")
    rows = [Pair(**row) for row in table.select(Pair._fields).to_pylist()]
    if not rows or not all(isinstance(value, str) for row in rows for value in row):
        raise FormatError(
            f"{path} has {len(rows):,} rows: expected some, each with {', '.join(Pair._fields)}. "
            f"{WAY_OUT}"
        )
    pairs: list[Pair] = []
    by_slice: dict[str, list[Pair]] = {name: [] for name in (*SLICES, *INTERVENTIONS)}
    for row in rows:
        if row.slice not in by_slice:
            raise FormatError(
                f"{path} has the slice {row.slice!r}: expected {', '.join(by_slice)}."
            )
        by_slice[row.slice].append(row)
    for members in by_slice.values():
        pairs += [members[number] for number in drawn(len(members), limit, seed)]
    return pairs
