"""The second stage of an index: files of a lens that are made from all parts, by any worker.

A job writes a range of cells, the contexts of some prototypes, or a part of the documents or of the
text, and needs no model.
"""

from __future__ import annotations

import shutil
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
from prismlm.errors import InputError
from prismlm.files import atomic_directory, link_or_copy, read_json, write_json
from prismlm.lens import layout, suffixes
from prismlm.lens.cell_files import CellFiles
from prismlm.lens.options import IndexOptions
from prismlm.lens.scan import Scan, check_size, scanned_positions
from prismlm.ops import top_contexts
from prismlm.parts import Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Busy, check_same, read_note, writing

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

CENTRES, FILES_FILE = "centres", "files.json"
# Prototypes whose contexts, and documents whose rows, are written by one job.
PROTOTYPES_OF_A_JOB, DOCUMENTS_OF_A_JOB = 2**12, 2**20
# Rows of a row group.
CONTEXT_ROWS, DOCUMENT_ROWS = 2**13, 2**12
WRITTEN: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
CHARACTERS_BEFORE, CHARACTERS_AFTER = 160, 80


class Job(NamedTuple):
    """A job, its number among those of its kind, and the directory that it makes."""

    kind: str
    number: int
    directory: Path


@dataclass(frozen=True)
class Assembly:
    """The jobs of a lens whose parts are finished; a call makes some, as a step of datatrove.

    Without a ``corpus`` there are only cells.
    """

    parts: Parts
    corpus: Path | None
    options: IndexOptions
    # The jobs of each kind, where they are known: counting them reads the parts and the corpus.
    counts: dict[str, int] | None = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Make every ``world_size``-th job that is not finished, or wait for who makes it."""
        if not self.jobs and not (self.parts.out / layout.META_FILE).is_file():
            raise InputError(
                f"{self.parts.path} has {len(self.parts.complete())} of {self.parts.count} parts: "
                "make the others before the files of the lens."
            )
        self.make(self.jobs[rank::world_size], wait=True)

    def make(self, jobs: list[Job], *, wait: bool, progress: Reporter = SILENT) -> None:
        """Make unfinished jobs; ``wait`` for processes that make some, or leave these to them."""
        for kind, number, directory in jobs:
            if directory.is_dir():
                continue
            with suppress(Busy), writing(directory, wait=wait):
                # Without parts, another process has written the lens meanwhile.
                if directory.is_dir() or not self.parts.complete():
                    continue
                with atomic_directory(directory) as made:
                    self._write(made, kind, number, progress)
                    # So that nobody has to read them again.
                    write_json(made / FILES_FILE, layout.describe_files(made))
                    shutil.copy(self.parts.part(0) / RUN_FILE, made)

    def _write(self, made: Path, kind: str, number: int, progress: Reporter) -> None:
        if kind == "cells":
            self.cells.write(made, number, progress)
            return
        corpus, split = self._corpus, self.options.split
        if kind == "contexts":
            self._write_contexts(made, number * PROTOTYPES_OF_A_JOB, progress)
        elif kind == "documents":
            chosen = slice(number * DOCUMENTS_OF_A_JOB, (number + 1) * DOCUMENTS_OF_A_JOB)
            names = layout.file_names([layout.CELL_DOCUMENTS_FILE], self._document_files)
            write_documents(made / names[number], corpus, corpus.split(split)[chosen])
        else:
            suffixes.write_part(made, corpus, split, number)
            if number == 0:
                suffixes.finish(made, corpus, split)

    def _write_contexts(self, made: Path, first: int, progress: Reporter) -> None:
        """Write ``index.parquet`` of a job, by prototype, from ``first`` on, and then by rank."""
        corpus, top = self._corpus, self.scan(slice(first, first + PROTOTYPES_OF_A_JOB)).top
        prototype, *columns = (column.numpy() for column in top_contexts.to_rows(top))
        cosine, position, document, activation, routed = columns
        rank = np.arange(len(prototype)) - np.searchsorted(prototype, prototype)
        documents, row = np.unique(document, return_inverse=True)
        texts = [pa.nulls(len(row), pa.string())] * 3
        if self.options.with_text:
            texts = _texts(corpus, documents, row, position, progress)
        facts = corpus.documents.take(documents).select([name for name, _ in FACTS])
        order = (prototype + first).astype(np.int32), rank.astype(np.int32)
        found = cosine, activation, routed, position
        table = pa.table(
            [*order, *found, *facts.take(pa.array(row)).columns, *texts], schema=layout.INDEX_SCHEMA
        )
        layout.write_table(table, made / layout.INDEX_FILE)

    @cached_property
    def jobs(self) -> list[Job]:
        """All jobs; none if parts are missing, perhaps since another process wrote the lens.

        Their results are independent of the workers.
        """
        # Whoever writes the lens, and then discards the parts, has this lock.
        with writing(self.parts.path, wait=True):
            if len(self.parts.complete()) < self.parts.count:
                return []
            return [
                Job(kind, number, self.parts.path / f"{kind}-{number:05d}-of-{count:05d}")
                for kind, count in (self.counts or self._count()).items()
                for number in range(count)
            ]

    def _count(self) -> dict[str, int]:
        what = f"the parts of {self.parts.out} are unlike each other"
        way_out = "With --overwrite, those that this command would make otherwise are made again."
        first, *others = (read_note(p / RUN_FILE, self.parts.path) for p in self._finished_parts)
        for other in others:  # before jobs are made of them, which --overwrite would keep
            check_same(what, first, other, way_out)
        counts = {"cells": len(self.cells.ranges)}
        if self.corpus is not None:
            counts["contexts"] = -(-len(self.cells.counts) // PROTOTYPES_OF_A_JOB)
            counts["documents"] = self._document_files
            if self.options.with_text:
                counts["text"] = suffixes.count_parts(self._corpus, self.options.split)
        return counts

    def finished(self) -> bool:
        """Return whether all jobs are finished; False if parts are missing."""
        return bool(self.jobs) and all(job.directory.is_dir() for job in self.jobs)

    @cached_property
    def cells(self) -> CellFiles:
        """The cells, from the positions of all parts."""
        scanned = [scanned_positions(part) for part in self._finished_parts]
        meta, runs = scanned[0][0], [run for _, run in scanned]
        cells = CellFiles(meta, runs, self.options.range_bytes)
        if meta.share < 1 and not cells.counts.any():
            raise InputError(
                f"no window of the corpus was drawn with --positions {meta.share:g}: expected at "
                "least one. Choose a larger share, and give the command with --overwrite."
            )
        return cells

    def scan(self, prototypes: slice = slice(None), ranks: slice = slice(None)) -> Scan:
        """Return the scan of the whole corpus, with the contexts of some prototypes and ranks."""
        parts = (Scan.load(part, prototypes, ranks) for part in self._finished_parts)
        scan = next(parts)
        for other in parts:
            scan.merge(other)
        return scan

    def collect(self, directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Put cells and text into the directory of a lens, without copying where that can be.

        Returns the entry of ``meta.json`` about cells, and sizes and digests of the files.
        """
        files: dict[str, dict[str, Any]] = {}
        contexts: list[Path] = []
        for kind, _, made in self.jobs:
            listed = read_json(made / FILES_FILE)
            for name, described in listed.items():
                check_size(made / name, described["bytes"])
            if kind == "contexts":
                contexts.append(made / layout.INDEX_FILE)
            else:
                files |= listed
                for name in listed:
                    link_or_copy(made / name, directory / name)
        centres = self.parts.path / CENTRES / layout.CELL_CENTRES_FILE
        if centres.is_file():
            link_or_copy(centres, directory / centres.name)
        entry = self.cells.entry()
        if self.corpus is not None:
            _join(contexts, directory / layout.INDEX_FILE)
            if self._document_files > 1:
                entry["document_files"] = self._document_files
        return entry, files

    @property
    def _finished_parts(self) -> list[Path]:
        return [self.parts.part(number) for number in range(self.parts.count)]

    @property
    def _document_files(self) -> int:
        documents, _ = split_counts(self._corpus, self.options.split)
        return -(-documents // DOCUMENTS_OF_A_JOB)

    @cached_property
    def _corpus(self) -> Corpus:
        from prismlm.corpus.store import Corpus

        assert self.corpus is not None
        return Corpus.open(self.corpus)


def _join(files: list[Path], path: Path) -> None:
    """Write the rows of all files, read one by one, in full row groups but for the last."""
    with pq.ParquetWriter(path, layout.INDEX_SCHEMA, **WRITTEN) as writer:
        rest = layout.INDEX_SCHEMA.empty_table()
        for file in files:
            rest = pa.concat_tables([rest, layout.read_table(file)])
            full = len(rest) if file == files[-1] else len(rest) // CONTEXT_ROWS * CONTEXT_ROWS
            if full:
                writer.write_table(rest[:full].combine_chunks(), CONTEXT_ROWS)
            rest = rest[full:]


def _texts(
    corpus: Corpus, documents: np.ndarray, row: np.ndarray, position: np.ndarray, progress: Reporter
) -> list[pa.Array]:
    """Return before, token and after for every context; each document is encoded once."""
    texts = np.empty((3, len(row)), object)
    order = np.argsort(row, kind="stable")
    groups = np.split(order, np.searchsorted(row[order], np.arange(1, len(documents))))
    with progress.task("Reading contexts", len(documents), "documents") as task:
        for number, rows in zip(documents.tolist(), groups, strict=True):
            text, spans, start = corpus.text(number), corpus.spans(number), corpus.starts[number]
            for i in rows.tolist():
                left, right = spans[position[i] - start]
                before, after = max(0, left - CHARACTERS_BEFORE), right + CHARACTERS_AFTER
                texts[:, i] = text[before:left], text[left:right], text[right:after]
            task.advance()
    return [pa.array(column, pa.string()) for column in texts]


def write_documents(path: Path, corpus: Corpus, numbers: np.ndarray) -> None:
    """Write the rows of some documents, in constant memory."""
    with pq.ParquetWriter(path, DOCUMENT_SCHEMA, **WRITTEN) as writer:
        for first in range(0, len(numbers), DOCUMENT_ROWS):
            table = corpus.documents.take(numbers[first : first + DOCUMENT_ROWS])
            writer.write_table(table.select(DOCUMENT_SCHEMA.names))
