"""Output files of commands: never over an input, and replaced only on request.

:func:`check_outputs` checks this before the work; :func:`output_files` opens the files, each as a
temporary sibling that is renamed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prismlm.errors import InputError, check_path
from prismlm.files import atomic_file, existing_directory, room_to_write, temporary_sibling
from prismlm.run_state import writing

if TYPE_CHECKING:
    import pyarrow as pa

DEVICES = Path("/dev")
WAY_OUT = "What was there is as it was. Free some space, or write elsewhere."


def check_outputs(
    *files: Path | None,
    directory: Path | None = None,
    inputs: Sequence[Path | str | None] = (),
    overwrite: bool = False,
) -> None:
    """Raise InputError, before the work, for outputs that cannot or must not be written.

    Args:
        *files: to be written; None is ignored.
        directory: to be written into, or None.
        inputs: files and directories that are read; None and missing ones are ignored.
        overwrite: whether existing files may be replaced; inputs never are.
    """
    paths = [path for path in files if path is not None]
    sources = [path for path in inputs if path is not None and os.path.exists(path)]
    for number, path in enumerate(paths):
        _check_file(path)
        if any(_replaces(path, source) for source in sources):
            raise InputError(f"{path} is read by this command: give another name to write to.")
        if any(_same(path, other) for other in paths[:number]):
            raise InputError(f"{path} is to be written twice: give each result a name of its own.")
        if os.path.lexists(path) and not overwrite:
            raise InputError(f"{path} exists: give another name, or replace it with --overwrite.")
    if directory is None:
        return
    _check_writable(directory, "x")
    if any(_same(directory, source) for source in sources):
        raise InputError(f"{directory} is read by this command: give another directory.")
    if os.path.isdir(directory) and os.listdir(directory) and not overwrite:
        raise InputError(
            f"{directory} is not empty: give another directory, or use --overwrite to replace "
            "files of the same names."
        )


def check_ending(path: Path | None, *endings: str) -> None:
    """Raise InputError unless the name of a file to write has one of the extensions."""
    if path is not None and path.suffix.lower() not in endings:
        raise InputError(f"{path}: expected a name that ends with {' or '.join(endings)}.")


@contextmanager
def output_files(*paths: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """Yield a temporary path for each file; all are renamed at the end, or none if it fails.

    Meanwhile no other process can write them, and leftovers of killed processes are removed.
    """
    targets = [check_path("the file to write", path) for path in paths]
    names = ", ".join(map(str, targets))
    with ExitStack() as stack:
        for target in targets:
            _check_file(target)
            stack.enter_context(room_to_write(names, target.parent, WAY_OUT))
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


def _same(one: Path | str, other: Path | str) -> bool:
    """Return whether two paths lead to the same file, through links or not."""
    return os.path.realpath(one) == os.path.realpath(other)


def _replaces(path: Path | str, source: Path | str) -> bool:
    """Return whether a path is that of a source, or of a file in it."""
    path = os.path.realpath(path)
    return os.path.exists(path) and Path(path).is_relative_to(os.path.realpath(source))


def _check_file(path: Path) -> None:
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory: give the name of a file to write.")
    # A rename would put a file in its place. Links in /dev may lead to files.
    if (os.path.exists(path) and not os.path.isfile(path)) or path.absolute().parent == DEVICES:
        raise InputError(f"{path} is a device or a pipe: give the name of a file to write.")
    _check_writable(path.parent, path.name)


def _check_writable(directory: Path, name: str) -> None:
    """Raise InputError unless a file can be written into a directory, which need not exist yet."""
    parent = existing_directory(directory)
    if not os.path.isdir(parent):
        raise InputError(f"{parent} is a file: give the name of a directory to write into.")
    # As long a name as the temporary file will have.
    probe = temporary_sibling(parent / name)
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{parent} cannot be written to ({error.strerror}): give another directory."
        ) from error
