"""The second stage of an index: ranges of cells, made by any worker once all parts are scanned.

It needs neither the model nor the corpus.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prismlm.errors import FormatError, InputError
from prismlm.files import atomic_directory, read_json, write_json
from prismlm.lens import layout
from prismlm.lens.cell_files import Range, Run, cells_entry, ranges_of, write_range
from prismlm.lens.cells import CellsMeta
from prismlm.lens.scan import scanned_positions
from prismlm.parts import Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Busy, writing

CENTRES = "centres"
FILES_FILE = "files.json"


@dataclass(frozen=True)
class RangeJobs:
    """The ranges of cells of a lens; one is made by a call, as a step of datatrove.

    ``parts`` is the number of parts, all of which must be finished.
    """

    lens: Path
    parts: int
    range_bytes: int

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Make a range unless it is finished, or wait for the process that makes it."""
        self.make(rank, wait=True)

    def make(self, number: int, *, wait: bool, progress: Reporter = SILENT) -> None:
        """Make a range unless it is finished; ``wait`` for another process or leave it to that."""
        directory = self.directory(number)
        if directory.is_dir():
            return
        with suppress(Busy), writing(directory, wait=wait):
            # Without parts, another process has written the lens meanwhile.
            if directory.is_dir() or not Parts(self.lens, self.parts).complete():
                return
            meta, runs = self._scanned
            with atomic_directory(directory) as made:
                write_range(made, runs, self.ranges, number, meta.vocabulary, progress)
                write_json(made / FILES_FILE, layout.describe_files(made))
                shutil.copy(runs[0].path.with_name(RUN_FILE), made)

    @cached_property
    def ranges(self) -> list[Range]:
        """First and last cell of each range: they depend on the sizes of cells alone."""
        return ranges_of(self._scanned[1], self.range_bytes)

    @cached_property
    def _scanned(self) -> tuple[CellsMeta, list[Run]]:
        parts = Parts(self.lens, self.parts)
        scanned = [
            scanned_positions(parts.part(number), parts.path / CENTRES)
            for number in range(self.parts)
        ]
        meta, runs = scanned[0][0], [run for _, run in scanned]
        if meta.share < 1 and not sum(run.ends[-1] for run in runs):
            raise InputError(
                f"no window of the corpus was drawn with --positions {meta.share:g}: expected at "
                "least one. Choose a larger share, and give the command with --overwrite."
            )
        return meta, runs

    def directory(self, number: int) -> Path:
        """Return the directory of a range."""
        parts = Parts(self.lens, self.parts)
        return parts.path / f"range-{number:05d}-of-{len(self.ranges):05d}"

    def finished(self) -> bool:
        """Return whether all ranges are finished."""
        return all(self.directory(number).is_dir() for number in range(len(self.ranges)))

    def collect(self, directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Put all ranges into the directory of a lens, without copying them where that can be.

        Returns the entry of ``meta.json`` about cells, and sizes and digests of their files.
        """
        files: dict[str, dict[str, Any]] = {}
        for made in map(self.directory, range(len(self.ranges))):
            listed = read_json(made / FILES_FILE)
            for name, entry in listed.items():
                size = (made / name).stat().st_size if (made / name).is_file() else 0
                if size != entry["bytes"]:
                    raise FormatError(
                        f"{made / name} has {size} bytes, expected {entry['bytes']}: it was "
                        f"damaged since it was written. Remove {made}, and give the same command "
                        "again: only this range is made again."
                    )
                _link(made / name, directory / name)
            files |= listed
        centres = Parts(self.lens, self.parts).path / CENTRES / layout.CELL_CENTRES_FILE
        if centres.is_file():
            _link(centres, directory / centres.name)
        return cells_entry(*self._scanned, self.ranges), files


def _link(file: Path, to: Path) -> None:
    """Make a file appear in another place too, by a hard link, or a copy if there are none."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
