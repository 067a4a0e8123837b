"""The files of a lens on a disk, memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from prismlm.lens import layout


def file_identity(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or rewritten; None for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


class LensFiles:
    """The files of a lens on a disk.

    Attributes:
        path: the directory of the files that do not grow with the corpus.
        address: of the lens, for messages and results.
        name: of the lens.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.address, self.name = path, str(path), path.resolve().name

    def identity(self) -> object:
        """Return what changes when ``meta.json`` is replaced; None if it is missing."""
        return file_identity(self.path / layout.META_FILE)

    def read_meta(self) -> layout.LensMeta:
        """Read ``meta.json``, and compare the sizes of all files with it."""
        return layout.read_meta(self.path)

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.path / name).is_file()

    def fetch(self, *names: str) -> None:
        """Make sure that files that do not grow with the corpus are in ``path``."""

    def check(
        self, meta: layout.LensMeta, names: Collection[str] | None = None, **options: Any
    ) -> None:
        """Compare files with their digests, as :func:`layout.check_files`."""
        layout.check_files(self.path, meta, names, **options)

    def check_local(self, command: str) -> None:
        """Raise InputError if a command needs a lens on a disk and this one is in a store."""

    def too_large(self, names: Collection[str]) -> str | None:
        """Return why files cannot be searched in many places; None if they can."""

    def arrays(self, *names: str) -> list[Any]:
        """Open arrays: memory-mapped, or as :class:`StoredArray`."""
        return [layout.open_array(self.path / name) for name in names]

    def table(self, name: str) -> Path | Callable[[], Any]:
        """Return a file for :class:`~prismlm.corpus.tables.ParquetTable`."""
        return self.path / name
