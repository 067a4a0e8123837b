"""Pairs of a sentence and a changed one, in Parquet: what perturbation studies ask of models."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.layout import strings
from prismlm.errors import FormatError, InputError

# Changes that leave the meaning as it is, and changes of it.
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


def read_pairs(path: Path) -> pa.Table:
    """Return the pairs of a file, with the columns of ``COLUMNS`` in that order.

    Args:
        path: a Parquet file; its ``id`` is unique, its ``slice`` one of ``SLICES`` and
            ``INTERVENTIONS``, and ``similarity`` alone may be null.

    """
    if not path.is_file():
        raise InputError(f"{path} is not a file: expected pairs in Parquet. {WAY_OUT}")
    try:
        table = pq.read_table(path)
        missing = [name for name in COLUMNS.names if name not in table.column_names]
        if missing:
            raise FormatError(f"{path} has no column {', '.join(missing)}. {WAY_OUT}")
        table = table.select(COLUMNS.names).cast(COLUMNS)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"{path} does not hold pairs in Parquet: {error}. {WAY_OUT}") from error
    if not len(table):
        raise FormatError(f"{path} holds no pairs. {WAY_OUT}")
    required = [name for name in COLUMNS.names if name != "similarity"]
    if any(table[name].null_count for name in required):
        raise FormatError(f"{path} has rows without {', '.join(required)}. {WAY_OUT}")
    if len(set(table["id"].to_pylist())) < len(table):
        raise FormatError(f"{path} has several rows of one id. {WAY_OUT}")
    unknown = sorted(set(table["slice"].to_pylist()) - {*SLICES, *INTERVENTIONS})
    if unknown:
        raise FormatError(
            f"{path} has the slice {unknown[0]!r}: expected {', '.join((*SLICES, *INTERVENTIONS))}."
        )
    return table
