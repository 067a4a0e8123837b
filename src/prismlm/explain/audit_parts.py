"""An audit in parts: texts dealt out to workers, whose sums and rows are put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count as counted_from
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

import prismlm
from prismlm import fingerprints
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader
from prismlm.explain.audit import Audit, write_audit
from prismlm.explain.language_model import load
from prismlm.files import atomic_directory, discard, read_json, write_json
from prismlm.lens.cells import Where
from prismlm.models.device import device_named
from prismlm.parts import Engine, Parts, located, run_parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, writing

# Texts that a part takes in a row: part i of N takes every Nth run of them.
RUN_LENGTH = 64
ROWS_FILE, LEFT_OUT_FILE = "rows.parquet", "left_out.json"


@dataclass(frozen=True)
class AuditPart:
    """One part of an audit, as a step of datatrove; finished parts are kept beside ``out``.

    The other arguments are those of :func:`prismlm.load`, of the texts, and of :class:`Audit`.
    """

    model: Path
    files: tuple[Path, ...]
    out: Path
    lens: str | None = None
    corpus: Path | None = None
    device: str = "cpu"
    columns: Columns = field(default_factory=Columns)
    skip_bad_rows: bool = False
    where: Where | None = None
    window: int | None = None
    # What :meth:`settings` returns, if it is known: it reads all files.
    run: dict[str, Any] | None = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read the texts of a part, unless it is finished."""
        part = Parts(self.out, world_size).part(rank)
        with writing(part):
            if part.is_dir():
                return
            audit = self.empty()
            reader = self.reader(audit.tokenizer)
            texts = documents_of(reader, rank, world_size)
            with atomic_directory(part) as directory:
                write_audit(audit.read(texts), [directory / ROWS_FILE])
                audit.save(directory)
                write_json(directory / LEFT_OUT_FILE, reader.left_out)
                write_json(directory / RUN_FILE, self.run or self.settings(audit, reader))

    def empty(self) -> Audit:
        """Open the model, and return an audit without texts."""
        lm = load(self.model, lens=self.lens, corpus=self.corpus, device=self.device)
        return Audit(lm, window=self.window, where=self.where)

    def reader(self, tokenizer: PreTrainedTokenizerBase | None = None) -> DocumentReader:
        """Return the texts; chats need a tokenizer."""
        return DocumentReader(
            list(self.files),
            self.columns,
            tokenizer=tokenizer,
            skip_bad_rows=self.skip_bad_rows,
            answered_chats="last",
        )

    def settings(self, audit: Audit, reader: DocumentReader) -> dict[str, Any]:
        """Return what all parts share; texts are identified by the contents of their files."""
        files = [fingerprints.of_file(file.path) for file in reader.files]
        return {
            **audit.identity,
            "window": audit.window,
            "columns": asdict(self.columns),
            "skip_bad_rows": self.skip_bad_rows,
            # Another version, or device, may round differently.
            "prismlm": prismlm.__version__,
            "device": device_named(self.device),
            "where": {column: list(values) for column, values in audit.where},
            "texts": files,
        }


def documents_of(documents: DocumentReader, number: int, count: int) -> Iterator[Document]:
    """Yield the documents of one part."""
    for index, document in enumerate(documents):
        if index // RUN_LENGTH % count == number:
            yield document


def _rows(parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield the rows of all texts of finished parts, in their order."""
    sources = [_rows_of(parts.part(number) / ROWS_FILE) for number in range(parts.count)]
    for run in counted_from():
        rows = list(islice(sources[run % len(sources)], RUN_LENGTH))
        yield from rows
        if len(rows) < RUN_LENGTH:
            return


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(RUN_LENGTH):
            yield from batch.to_pylist()


def audit_in_parts(
    part: AuditPart,
    count: int,
    paths: Sequence[Path] = (),
    *,
    engine: Engine = "local",
    workers: int = 1,
    overwrite: bool = False,
    progress: Reporter = SILENT,
) -> tuple[Audit, dict[str, int]]:
    """Audit texts in parts, and write all rows to ``paths``, by default to the part's ``out``.

    Finished parts are not read again; ``overwrite`` discards those of other inputs. Returned are
    the sums, and how many texts were left out, by reason. Errors are those of
    :func:`prismlm.parts.run_parts`, and InputError for such parts.
    """
    files = tuple(path.absolute() if path.exists() else path for path in part.files)
    part = replace(located(part, "model", "corpus"), files=files, out=part.out.absolute())
    audit, parts = replace(part, device="cpu").empty(), Parts(part.out, count)
    reader = part.reader(audit.tokenizer)
    for _ in reader:
        # Report a bad row before a worker starts.
        pass
    part = replace(part, run=part.settings(audit, reader))
    parts.check(part.run or {}, overwrite=overwrite)
    gpus = device_named(part.device) == "cuda"
    run_parts(part, count, engine=engine, workers=workers, gpus=gpus, progress=progress)
    for number in range(count):
        audit.add_saved(parts.part(number))
    # Every part has read all rows, and left the same ones out.
    left_out = read_json(parts.part(0) / LEFT_OUT_FILE)
    write_audit(_rows(parts), paths or [part.out])
    discard(parts.path)
    return audit, left_out
