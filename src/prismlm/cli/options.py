"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only estimate time, memory and disk.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory.")]


def is_first_process() -> bool:
    """Say whether this is the process that speaks, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"
