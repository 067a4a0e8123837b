"""A study in a directory: its finished parts are stored one by one, to resume it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prismlm.errors import FormatError
from prismlm.files import keep_json, read_json
from prismlm.run_state import begin, keeping

T = TypeVar("T")


def make_parts(
    out: Path, folder: str, note: Mapping[str, Any], parts: Mapping[str, Callable[[], Any]]
) -> None:
    """Compute the parts that ``out/folder`` lacks, a JSON file ``NAME.json`` each.

    ``run.json`` in ``out`` records ``note``, the settings. A directory with other settings is
    refused.
    """
    directory = out / folder
    started = any(directory.glob("*.json"))
    if started:
        begin(out, note, made=True)
    with keeping(lambda: f"{len([*directory.glob('*.json')])} finished parts are kept in {out}."):
        for name, make in parts.items():
            path = directory / f"{name}.json"
            if path.is_file():
                continue
            value = make()
            if not started:
                directory.mkdir(parents=True, exist_ok=True)
                begin(out, note, made=False)
                started = True
            keep_json(path, value)


def read_part(path: Path, use: Callable[[Any], T]) -> T:
    """Return ``use`` of a stored part; the error for a damaged one names its file."""
    try:
        return use(read_json(path))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise FormatError(
            f"{path} is not what a run writes ({error!r}). Remove it, and the same command makes "
            "that part again."
        ) from error
