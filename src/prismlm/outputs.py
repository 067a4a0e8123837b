"""Every file that a command writes: never over what it reads, and over nothing unasked.

:func:`check_outputs` says so before the work that the results come from; :func:`output_files` opens
them, each as a temporary sibling that gets its name at the end.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.errors import InputError, check_path
from prismlm.files import atomic_file, room_to_write, temporary_sibling
from prismlm.run_state import writing

if TYPE_CHECKING:
    import pyarrow as pa

WAY_OUT = "What was there is as it was. Free some space, or write elsewhere."


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
            outputs in one place; a directory or a device in the place of a file, a file in the
            place of a directory, or a place that cannot be written to.
    """
    given = [path for path in files if path is not None]
    read = [path for path in inputs if path is not None and os.path.exists(path)]
    for number, path in enumerate(given):
        _check_kind(path)
        for one in read:
            _check_apart(path, one)
        if any(_same(path, other) for other in given[:number]):
            raise InputError(f"{path} is to be written twice: give each result a name of its own.")
    for path in [*given, *([] if directory is None else [directory / "x"])]:
        _check_place(path)
    if directory is not None and any(_same(directory, one) for one in read):
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


def check_ending(path: Path | None, *endings: str) -> None:
    """Check the name of a file to write; None is passed over.

    Raises:
        InputError: it ends with none of ``endings``.
    """
    if path is not None and path.suffix.lower() not in endings:
        raise InputError(f"{path}: expected a name that ends with {' or '.join(endings)}.")


@contextmanager
def output_files(*paths: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """Yield a temporary path for each; all get their names at the end, or none is there.

    If the block fails, Ctrl-C among it, files from before are as they were. While it runs, no other
    process can write them, and what one that was killed left beside them is removed.

    Raises:
        InputError: another process writes one of them, a directory or a device stands there, or
            a place cannot be written to.
        PrismError: the disk is full.
    """
    targets = [check_path("the file to write", path) for path in paths]
    names = ", ".join(map(str, targets))
    with ExitStack() as stack:
        for target in targets:
            _check_kind(target)
            _check_place(target)
            stack.enter_context(room_to_write(names, _existing(target.parent), WAY_OUT))
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(writing(target))
        yield [stack.enter_context(atomic_file(target)) for target in targets]


@contextmanager
def output_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path for one file, as :func:`output_files`."""
    with output_files(path) as (temporary,):
        yield temporary


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text in UTF-8, as :func:`output_files`."""
    with output_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_table(path: str | os.PathLike[str], table: pa.Table) -> None:
    """Write a table as Parquet, as :func:`output_files`."""
    import pyarrow.parquet as pq

    with output_file(path) as temporary:
        pq.write_table(table, temporary)


def write_csv(
    path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write rows as CSV, as :func:`output_files`; a column that a row lacks is empty there."""
    with output_file(path) as temporary:
        put_csv(temporary, columns, rows)


def put_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV to a place that the caller opened; as :func:`write_csv` otherwise."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _same(one: Path | str, other: Path | str) -> bool:
    """Say whether two paths are of one place, through links and however they are spelled."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _check_kind(path: Path) -> None:
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory: give the name of a file to write.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is a device or a pipe: give the name of a file to write.")


def _check_apart(path: Path, read: Path | str) -> None:
    if _same(path, read):
        raise InputError(f"{path} is read by this command: give another name to write to.")
    within = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(read))
    if os.path.isdir(read) and within and os.path.lexists(path):
        raise InputError(
            f"{path} belongs to {read}, which this command reads: give another name to write to."
        )


def _existing(place: Path) -> Path:
    """Return the nearest directory above that is there."""
    there = place.absolute()
    while not os.path.lexists(there):
        there = there.parent
    return there


def _check_place(path: Path) -> None:
    there = _existing(path.parent)
    if not os.path.isdir(there):
        raise InputError(f"{there} is a file: give the name of a directory to write into.")
    # With the name as long as it will be while it is written.
    probe = temporary_sibling(there / path.name)
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{there} cannot be written to ({error.strerror}): give another place."
        ) from error
