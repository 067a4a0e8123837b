"""Options that several commands share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from prismlm.errors import InputError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only estimate time, memory and disk.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory.")]
Lens = Annotated[
    str | None, typer.Option(metavar="NAME|DIR", help="The lens, where there are several.")
]
By = Annotated[
    str, typer.Option(metavar="COLUMN", help="Shares by document, source, domain or license.")
]
Method = Annotated[
    str,
    typer.Option(metavar="METHOD", help="evidence, contexts, or source: PRISM's A = Σ α μ."),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=VALUE", help="Only text that matches, such as license=CC0; may be repeated."
    ),
]
Window = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens read at once; else all, up to 1,024.")
]
Stride = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens between windows; else 3/4 of one.")
]


def parse_places(option: str, inner: str, given: list[str] | None) -> list[tuple[int, int]]:
    """Return what was given as ``LAYER:INNER``, such as 6:2.

    Raises:
        InputError: something else was given.
    """
    found: list[tuple[int, int]] = []
    for text in given or []:
        layer, _, number = text.partition(":")
        if not (layer.isdecimal() and number.isdecimal()):
            raise InputError(f"{option} is {text!r}: expected LAYER:{inner}, such as 1:14.")
        found.append((int(layer), int(number)))
    return found


def check_outputs(*files: Path | None, directory: Path | None = None) -> None:
    """Check that results can be written, before the work that they come from.

    Args:
        *files: to be written; None is passed over.
        directory: to be written into, or None.

    Raises:
        InputError: a directory in the place of a file, a file in the place of a directory, or a
            place that cannot be written to.
    """
    for path in files:
        if path is not None and os.path.isdir(path):
            raise InputError(f"{path} is a directory: give the name of a file to write.")
    places = [path.parent for path in files if path is not None]
    for place in places if directory is None else [*places, directory]:
        there = place.absolute()
        while not os.path.exists(there):
            there = there.parent
        if not os.path.isdir(there):
            raise InputError(f"{there} is a file: give the name of a directory to write into.")
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise InputError(
                f"{there} cannot be written to ({error.strerror}): give another place."
            ) from error


def is_first_process() -> bool:
    """Say whether this is the process that speaks, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"
