"""What studies share: finished parts, names of models, samples of rows, Parquet input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import FormatError, InputError
from prismlm.files import keep_json
from prismlm.run_state import begin, keeping, writing


def make_parts(
    out: Path, folder: str, note: Mapping[str, Any], parts: Mapping[str, Callable[[], Any]]
) -> None:
    """Compute the parts that ``out/folder`` lacks, a JSON file ``NAME.json`` each.

    ``run.json`` in ``out`` records ``note``, the settings. A directory with other settings is
    refused.
    """
    directory = out / folder
    directory.mkdir(parents=True, exist_ok=True)
    begin(out, note, made=any(directory.glob("*.json")))
    with keeping(lambda: f"Finished parts are kept in {out}."):
        for name, make in parts.items():
            if not (path := directory / f"{name}.json").is_file():
                keep_json(path, make())


def run_study(
    file: Path,
    folder: str,
    note: Mapping[str, Any],
    parts: Mapping[str, Callable[[], Any]],
    result: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Compute missing parts beside ``file``, by :func:`make_parts`; write and return the result."""
    with writing(file):
        make_parts(file.parent, folder, note, parts)
        value = result()
        keep_json(file, value)
    return value


def unique_names(models: Sequence[Path]) -> dict[str, Path]:
    """Return models by the name of their directory, or by path where names are the same."""
    if len({path.resolve() for path in models}) < len(models):
        raise InputError("a model is given twice: give each model once.")
    names = [path.absolute().name for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def sample_rows(count: int, limit: int | None, seed: int) -> list[int]:
    """Return ``limit`` of ``count`` row numbers, drawn by a seed and sorted; None for all."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit]).tolist()


def read_columns(path: Path, columns: Sequence[str], remedy: str = "") -> pa.Table:
    """Return these columns of a Parquet file, which has at least one row."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"{path} cannot be read as Parquet: {error!r}. {remedy}") from error
    if not len(table) or not set(columns) <= set(table.column_names):
        raise FormatError(
            f"{path} has {len(table):,} rows of the columns {', '.join(table.column_names)}: "
            f"expected rows of {', '.join(columns)}. {remedy}"
        )
    return table.select(columns)
