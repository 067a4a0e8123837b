"""The second stage of an index: files of a lens that are made from all parts, by any worker.

A job writes a range of cells, or merges the contexts of some prototypes. Jobs need no model.
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
from prismlm.lens.scan import SCAN_FILE, Scan, scanned_positions
from prismlm.parts import Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Busy, writing

CENTRES = "centres"
FILES_FILE = "files.json"


@dataclass(frozen=True)
class Assembly:
    """The jobs of a lens whose parts are finished; a call makes one, as a step of datatrove.

    ``parts`` is the number of parts, ``range_bytes`` the size of a range of cells.
    """

    lens: Path
    parts: int
    range_bytes: int

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Make a job unless it is finished, or wait for the process that makes it."""
        self.make(rank, wait=True)

    def make(self, number: int, *, wait: bool, progress: Reporter = SILENT) -> None:
        """Make a job unless it is finished; ``wait`` for another process or leave it to that."""
        directory = self.directories[number]
        if directory.is_dir():
            return
        with suppress(Busy), writing(directory, wait=wait):
            # Without parts, another process has written the lens meanwhile.
            if directory.is_dir() or not self._parts.complete():
                return
            with atomic_directory(directory) as made:
                if number < len(self.ranges):
                    meta, runs = self._scanned
                    write_range(made, runs, self.ranges, number, meta.vocabulary, progress)
                    write_json(made / FILES_FILE, layout.describe_files(made))
                else:
                    self._merged_scan(number - len(self.ranges)).save(made)
                shutil.copy(self._parts.part(0) / RUN_FILE, made)

    @cached_property
    def ranges(self) -> list[Range]:
        """First and last cell of each range: they depend on the sizes of cells alone."""
        return ranges_of(self._scanned[1], self.range_bytes)

    @cached_property
    def directories(self) -> list[Path]:
        """What each job makes."""
        kinds = {"cells": len(self.ranges), "contexts": self._slices}
        return [
            self._parts.path / f"{kind}-{number:05d}-of-{count:05d}"
            for kind, count in kinds.items()
            for number in range(count)
        ]

    def finished(self) -> bool:
        """Return whether all jobs are finished."""
        return all(directory.is_dir() for directory in self.directories)

    def scan(self) -> Scan:
        """Return the scan of the whole corpus, without positions."""
        if not self._slices:
            return self._merged_scan(0)
        return Scan.joined([Scan.load(made) for made in self.directories[len(self.ranges) :]])

    def collect(self, directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Put the cells into the directory of a lens, without copying them where that can be.

        Returns the entry of ``meta.json`` about cells, and sizes and digests of their files.
        """
        files: dict[str, dict[str, Any]] = {}
        for made in self.directories[: len(self.ranges)]:
            listed = read_json(made / FILES_FILE)
            for name, entry in listed.items():
                size = (made / name).stat().st_size if (made / name).is_file() else 0
                if size != entry["bytes"]:
                    raise FormatError(
                        f"{made / name} has {size} bytes, expected {entry['bytes']}: it was "
                        f"damaged since it was written. Remove {made}, and give the same command "
                        "again: only these cells are written again."
                    )
                _link(made / name, directory / name)
            files |= listed
        centres = self._parts.path / CENTRES / layout.CELL_CENTRES_FILE
        if centres.is_file():
            shutil.copyfile(centres, directory / centres.name)
            files[centres.name] = layout.describe(centres)
        return cells_entry(*self._scanned, self.ranges), files

    @property
    def _parts(self) -> Parts:
        return Parts(self.lens, self.parts)

    @cached_property
    def _scanned(self) -> tuple[CellsMeta, list[Run]]:
        centres = self._parts.path / CENTRES
        scanned = [scanned_positions(self._parts.part(n), centres) for n in range(self.parts)]
        meta, runs = scanned[0][0], [run for _, run in scanned]
        if meta.share < 1 and not sum(run.ends[-1] for run in runs):
            raise InputError(
                f"no window of the corpus was drawn with --positions {meta.share:g}: expected at "
                "least one. Choose a larger share, and give the command with --overwrite."
            )
        return meta, runs

    @cached_property
    def _slices(self) -> int:
        """In how many slices the contexts of all parts are merged; 0: at the end, if it is little.

        A part has those of all prototypes, and a process merges one part after another.
        """
        size = self.parts * (self._parts.part(0) / SCAN_FILE).stat().st_size
        slices = min(self.parts, size // self.range_bytes, len(self._scanned[1][0].counts))
        return slices if slices > 1 else 0

    def _merged_scan(self, number: int) -> Scan:
        """Return the scan of all parts for one slice of the prototypes."""
        count, slices = len(self._scanned[1][0].counts), max(1, self._slices)
        prototypes = slice(count * number // slices, count * (number + 1) // slices)
        scan = Scan.load(self._parts.part(0), prototypes)
        for part in range(1, self.parts):
            scan.merge(Scan.load(self._parts.part(part), prototypes))
        return scan


def _link(file: Path, to: Path) -> None:
    """Make a file appear in another place too, by a hard link, or a copy if there are none."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
