"""The second stage of an index: files of a lens that are made from all parts, by any worker.

A job writes a range of cells or a part of the text, and needs no model.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prismlm.errors import FormatError, InputError
from prismlm.files import atomic_directory, read_json, write_json
from prismlm.lens import layout, suffixes
from prismlm.lens.cell_files import (
    Range,
    Run,
    cells_entry,
    ranges_of,
    total_counts,
    write_range,
)
from prismlm.lens.cells import CellsMeta
from prismlm.lens.scan import Scan, scanned_positions
from prismlm.parts import Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Busy, writing

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

CENTRES = "centres"
FILES_FILE = "files.json"


class Job(NamedTuple):
    """A job, its number among those of its kind, and the directory that it makes."""

    kind: str
    number: int
    directory: Path


@dataclass(frozen=True)
class Assembly:
    """The jobs of a lens whose parts are finished; a call makes some, as a step of datatrove.

    ``parts`` is the number of parts, ``range_bytes`` the size of a range of cells. Without a
    ``corpus``, the lens has no text.
    """

    lens: Path
    parts: int
    range_bytes: int
    corpus: Path | None
    split: Split
    # The number of jobs of each kind, if it is known: counting them reads the parts and the corpus.
    counts: dict[str, int] | None = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Make every ``world_size``-th job that is not finished, or wait for who makes it."""
        if not self.jobs and not (self.lens / layout.META_FILE).is_file():
            raise InputError(
                f"{self._parts.path} has {len(self._parts.complete())} of {self.parts} parts: make "
                "the others before the files of the lens."
            )
        for number in range(rank, len(self.jobs), world_size):
            self.make(number, wait=True)

    def make(self, number: int, *, wait: bool, progress: Reporter = SILENT) -> None:
        """Make a job unless it is finished; ``wait`` for another process or leave it to that."""
        kind, at, directory = self.jobs[number]
        if directory.is_dir():
            return
        with suppress(Busy), writing(directory, wait=wait):
            # Without parts, another process has written the lens meanwhile.
            if directory.is_dir() or not self._parts.complete():
                return
            with atomic_directory(directory) as made:
                if kind == "cells":
                    meta, runs = self._scanned
                    write_range(made, runs, self.ranges, at, meta.vocabulary, progress)
                else:
                    suffixes.write_part(made, self._corpus, self.split, at)
                # So that nobody has to read them again.
                write_json(made / FILES_FILE, layout.describe_files(made))
                shutil.copy(self._parts.part(0) / RUN_FILE, made)

    @cached_property
    def ranges(self) -> list[Range]:
        """First and last cell of each range: they depend on the sizes of cells alone."""
        return ranges_of(self._scanned[1], self.range_bytes)

    @cached_property
    def jobs(self) -> list[Job]:
        """All jobs; none if parts are missing, perhaps since another process wrote the lens.

        Their results are independent of the workers.
        """
        # Whoever writes the lens, and then discards the parts, has this lock.
        with writing(self._parts.path, wait=True):
            if len(self._parts.complete()) < self.parts:
                return []
            return [
                Job(kind, number, self._parts.path / f"{kind}-{number:05d}-of-{count:05d}")
                for kind, count in (self.counts or self.counted()).items()
                for number in range(count)
            ]

    @property
    def divided(self) -> bool:
        """Whether there are several jobs of a kind."""
        return len(self.jobs) > len({job.kind for job in self.jobs})

    def counted(self) -> dict[str, int]:
        """Count the jobs of each kind."""
        text = 0 if self.corpus is None else suffixes.count_parts(self._corpus, self.split)
        return {"cells": len(self.ranges), "text": text}

    @cached_property
    def _corpus(self) -> Corpus:
        from prismlm.corpus.store import Corpus

        assert self.corpus is not None
        return Corpus.open(self.corpus)

    def finished(self) -> bool:
        """Return whether all jobs are finished; False if parts are missing."""
        return bool(self.jobs) and all(job.directory.is_dir() for job in self.jobs)

    @property
    def sizes(self) -> np.ndarray:
        """The positions of each cell, int64 [K]."""
        return total_counts(self._scanned[1])

    def scan(self) -> Scan:
        """Return the scan of the whole corpus, without positions."""
        scan = Scan.load(self._parts.part(0))
        for part in range(1, self.parts):
            scan.merge(Scan.load(self._parts.part(part)))
        return scan

    def collect(self, directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Put cells and text into the directory of a lens, without copying where that can be.

        Returns the entry of ``meta.json`` about cells, and sizes and digests of the files.
        """
        files: dict[str, dict[str, Any]] = {}
        for made in [job.directory for job in self.jobs]:
            listed = read_json(made / FILES_FILE)
            for name, entry in listed.items():
                size = (made / name).stat().st_size if (made / name).is_file() else 0
                if size != entry["bytes"]:
                    raise FormatError(
                        f"{made / name} has {size} bytes, expected {entry['bytes']}: it was "
                        f"damaged since it was written. Remove {made}, and give the same command "
                        "again: only these files are written again."
                    )
                _link(made / name, directory / name)
            files |= listed
        centres = self._parts.path / CENTRES / layout.CELL_CENTRES_FILE
        if centres.is_file():
            _link(centres, directory / centres.name)
        if self.corpus is not None:
            suffixes.finish(directory, self._corpus, self.split)
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


def _link(file: Path, to: Path) -> None:
    """Make a file appear in another place too, by a hard link, or a copy if there are none."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)
