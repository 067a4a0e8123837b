"""Options that several commands share."""

from __future__ import annotations

import os
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
TEXT_KINDS = "txt, md, json, jsonl, csv, parquet"
TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="FILE", help=f"Texts to read; may be repeated: {TEXT_KINDS}."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace result files that exist.")]
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


def is_first_process() -> bool:
    """Say whether this is the process that speaks, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"
