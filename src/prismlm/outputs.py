"""Where a command's results go: never over what it reads, and over nothing unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prismlm.errors import InputError


def check_outputs(
    *files: Path | None,
    directory: Path | None = None,
    inputs: Sequence[Path | str | None] = (),
    overwrite: bool = False,
) -> None:
    """Check that results can be written and replace nothing, before the work that they come from.

    Args:
        *files: to be written; None is passed over.
        directory: to be written into, or None.
        inputs: files and directories that are read; None and what is not there are passed over.
        overwrite: whether files that exist may be replaced; those that are read never are.

    Raises:
        InputError: a file that is read, or lies in a directory that is read; one that exists; two
            outputs in one place; a directory in the place of a file, a file in the place of a
            directory, or a place that cannot be written to.
    """
    given = [path for path in files if path is not None]
    for path in given:
        if os.path.isdir(path):
            raise InputError(f"{path} is a directory: give the name of a file to write.")
        _check_read(path, inputs)
    for number, path in enumerate(given):
        if any(_same(path, other) for other in given[:number]):
            raise InputError(f"{path} is to be written twice: give each result a name of its own.")
    for place in [path.parent for path in given] + ([] if directory is None else [directory]):
        _check_place(place)
    if directory is not None and any(_same(directory, one) for one in inputs if one is not None):
        raise InputError(f"{directory} is read by this command: give another directory.")
    if overwrite:
        return
    for path in given:
        if os.path.lexists(path):
            raise InputError(f"{path} exists: give another name, or replace it with --overwrite.")
    if directory is not None and os.path.isdir(directory) and os.listdir(directory):
        raise InputError(
            f"{directory} is not empty: give another directory, or replace what is there and has "
            "the same names with --overwrite."
        )


def _same(one: Path | str, other: Path | str) -> bool:
    """Say whether two paths are of one place, through links and however they are spelled."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _check_read(path: Path, inputs: Sequence[Path | str | None]) -> None:
    for read in inputs:
        if read is None or not os.path.exists(read):
            continue
        if _same(path, read):
            raise InputError(f"{path} is read by this command: give another name to write to.")
        within = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(read))
        if os.path.isdir(read) and within and os.path.lexists(path):
            raise InputError(
                f"{path} belongs to {read}, which this command reads: give another name to write "
                "to."
            )


def _check_place(place: Path) -> None:
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
