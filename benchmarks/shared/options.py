"""What the command lines of the scripts share, and where their results lie."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path("docs/results")
"""Seen from the repository's root, where every script is run."""


def script_options(description: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's text as it stands; ``--out`` if it writes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    if out is not None:
        parser.add_argument("--out", type=Path, default=out)
    return parser


def add_numbers(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Add an option for each number."""
    for name, value in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"default: {value}")


def training_options(
    description: str | None, parts: Iterable[str], *, work: str, out: Path
) -> argparse.ArgumentParser:
    """Return a parser of a corpus, what is run on it, a seed, threads, and two folders."""
    parser = script_options(description, out)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(work))
    return parser
