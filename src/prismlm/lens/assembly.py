"""The second stage of an index: files of a lens that are made from all parts, by any worker.

A job writes a range of cells, the contexts of some prototypes, or a part of the documents or of the
text, and needs no model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.layout import DOCUMENT_SCHEMA, FACTS
from prismlm.corpus.windows import split_counts
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
from prismlm.ops import top_contexts
from prismlm.parts import Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Busy, writing

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

CENTRES = "centres"
FILES_FILE = "files.json"
# Prototypes whose contexts, and documents whose rows, are written by one job.
PROTOTYPES_OF_A_JOB, DOCUMENTS_OF_A_JOB = 2**12, 2**20
# Rows of a row group.
CONTEXT_ROWS, DOCUMENT_ROWS = 2**13, 2**12
CHARACTERS_BEFORE, CHARACTERS_AFTER = 160, 80


class Job(NamedTuple):
    """A job, its number among those of its kind, and the directory that it makes."""

    kind: str
    number: int
    directory: Path


@dataclass(frozen=True)
class Assembly:
    """The jobs of a lens whose parts are finished; a call makes some, as a step of datatrove.

    ``parts`` is the number of parts, ``range_bytes`` the size of a range of cells. Without a
    ``corpus`` there are only cells.
    """

    lens: Path
    parts: int
    range_bytes: int
    corpus: Path | None
    split: Split
    with_text: bool = True
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
                self._write(made, kind, at, progress)
                # So that nobody has to read them again.
                write_json(made / FILES_FILE, layout.describe_files(made))
                shutil.copy(self._parts.part(0) / RUN_FILE, made)

    def _write(self, made: Path, kind: str, at: int, progress: Reporter) -> None:
        if kind == "cells":
            meta, runs = self._scanned
            write_range(made, runs, self.ranges, at, meta.vocabulary, progress)
        elif kind == "contexts":
            self._write_contexts(made, at * PROTOTYPES_OF_A_JOB, progress)
        elif kind == "documents":
            chosen = slice(at * DOCUMENTS_OF_A_JOB, (at + 1) * DOCUMENTS_OF_A_JOB)
            name = layout.document_files(self._document_files)[at]
            write_documents(made / name, self._corpus, self._corpus.split(self.split)[chosen])
        else:
            suffixes.write_part(made, self._corpus, self.split, at)
            if at == 0:
                suffixes.finish(made, self._corpus, self.split)

    def _write_contexts(self, made: Path, first: int, progress: Reporter) -> None:
        """Write ``index.parquet`` of a job, by prototype, from ``first`` on, and then by rank."""
        corpus, top = self._corpus, self.scan(slice(first, first + PROTOTYPES_OF_A_JOB)).top
        prototype, *columns = (column.numpy() for column in top_contexts.to_rows(top))
        cosine, position, document, activation, routed = columns
        rank = np.arange(len(prototype)) - np.searchsorted(prototype, prototype)
        documents, row = np.unique(document, return_inverse=True)
        texts = [pa.nulls(len(row), pa.string())] * 3
        if self.with_text:
            texts = _texts(corpus, documents, row, position, progress)
        facts = corpus.documents.take(documents).select([name for name, _ in FACTS])
        order = (prototype + first).astype(np.int32), rank.astype(np.int32)
        found = cosine, activation, routed, position
        table = pa.table(
            [*order, *found, *facts.take(pa.array(row)).columns, *texts], schema=layout.INDEX_SCHEMA
        )
        layout.write_table(table, made / layout.INDEX_FILE, row_group_size=CONTEXT_ROWS)

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
        counts = {"cells": len(self.ranges)}
        if self.corpus is not None:
            counts["contexts"] = -(-len(self.sizes) // PROTOTYPES_OF_A_JOB)
            counts["documents"] = self._document_files
        if self.corpus is not None and self.with_text:
            counts["text"] = suffixes.count_parts(self._corpus, self.split)
        return counts

    @property
    def _document_files(self) -> int:
        documents, _ = split_counts(self._corpus, self.split)
        return -(-documents // DOCUMENTS_OF_A_JOB)

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

    def scan(self, prototypes: slice = slice(None), ranks: slice = slice(None)) -> Scan:
        """Return the scan of the whole corpus, with the contexts of some prototypes and ranks."""
        scan = Scan.load(self._parts.part(0), prototypes, ranks)
        for part in range(1, self.parts):
            scan.merge(Scan.load(self._parts.part(part), prototypes, ranks))
        return scan

    def collect(self, directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Put cells and text into the directory of a lens, without copying where that can be.

        Returns the entry of ``meta.json`` about cells, and sizes and digests of the files.
        """
        files: dict[str, dict[str, Any]] = {}
        for job in self.jobs:
            listed = _checked_files(job.directory)
            if job.kind != "contexts":
                for name in listed:
                    _link(job.directory / name, directory / name)
                files |= listed
        centres = self._parts.path / CENTRES / layout.CELL_CENTRES_FILE
        if centres.is_file():
            _link(centres, directory / centres.name)
        entry = cells_entry(*self._scanned, self.ranges)
        if self.corpus is not None:
            made = [job.directory for job in self.jobs if job.kind == "contexts"]
            join_contexts(made, directory)
            if self._document_files > 1:
                entry["document_files"] = self._document_files
        return entry, files

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


def _checked_files(made: Path) -> dict[str, dict[str, Any]]:
    """Return what a job recorded of its files; FormatError if one has another size."""
    listed = read_json(made / FILES_FILE)
    for name, entry in listed.items():
        size = (made / name).stat().st_size if (made / name).is_file() else 0
        if size != entry["bytes"]:
            raise FormatError(
                f"{made / name} has {size} bytes, expected {entry['bytes']}: it was damaged since "
                f"it was written. Remove {made}, and give the same command again: only these files "
                "are written again."
            )
    return listed


def _link(file: Path, to: Path) -> None:
    """Make a file appear in another place too, by a hard link, or a copy if there are none."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)


def _texts(
    corpus: Corpus, documents: np.ndarray, row: np.ndarray, position: np.ndarray, progress: Reporter
) -> list[pa.Array]:
    """Return before, token and after for every context; each document is encoded once."""
    before, token, after = ([""] * len(row) for _ in range(3))
    order = np.argsort(row, kind="stable")
    groups = np.split(order, np.searchsorted(row[order], np.arange(1, len(documents))))
    with progress.task("Reading contexts", len(documents), "documents") as task:
        for number, rows in zip(documents.tolist(), groups, strict=True):
            text, spans, start = corpus.text(number), corpus.spans(number), corpus.starts[number]
            for i in rows.tolist():
                left, right = spans[position[i] - start]
                before[i] = text[max(0, left - CHARACTERS_BEFORE) : left]
                token[i] = text[left:right]
                after[i] = text[right : right + CHARACTERS_AFTER]
            task.advance()
    return [pa.array(column, pa.string()) for column in (before, token, after)]


def join_contexts(made: Sequence[Path], directory: Path) -> None:
    """Write the contexts of all prototypes, from those of several jobs, one after the other."""
    path, schema = directory / layout.INDEX_FILE, layout.INDEX_SCHEMA
    with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        rest = schema.empty_table()
        for number, job in enumerate(made, 1):
            rest = pa.concat_tables([rest, layout.read_table(job / layout.INDEX_FILE)])
            # Row groups of the lens are full, but for the last.
            full = len(rest) if number == len(made) else len(rest) // CONTEXT_ROWS * CONTEXT_ROWS
            if full:
                writer.write_table(rest[:full].combine_chunks(), CONTEXT_ROWS)
            rest = rest[full:]


def write_documents(path: Path, corpus: Corpus, numbers: np.ndarray) -> None:
    """Write the rows of some documents, in constant memory."""
    options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(path, DOCUMENT_SCHEMA, **options) as writer:
        for first in range(0, len(numbers), DOCUMENT_ROWS):
            table = corpus.documents.take(numbers[first : first + DOCUMENT_ROWS])
            writer.write_table(table.select(DOCUMENT_SCHEMA.names))
