"""Many texts explained or audited in parts by workers: ``--workers`` of ``explain`` and ``audit``.

A part has successive texts, so that the rows of all parts in their order are those of all texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

import prismlm
from prismlm import fingerprints
from prismlm.corpus.documents import Columns
from prismlm.corpus.read import DocumentReader
from prismlm.explain.audit import Audit, write_audit
from prismlm.explain.language_model import PrismLM, load
from prismlm.explain.rows import write_rows
from prismlm.explain.trace import table_rows
from prismlm.files import atomic_directory, discard, write_json
from prismlm.lens.cells import Where
from prismlm.lens.layout import key_of
from prismlm.models.device import device_named
from prismlm.outputs import output_file
from prismlm.parts import Parts, located, run_parts
from prismlm.run_state import RUN_FILE, writing

ROWS_FILE = "rows.parquet"
# Successive texts of an audit share batches.
RUN_LENGTH = 16


@dataclass(frozen=True)
class _Job(ABC):
    """What workers do, as a step of datatrove; finished parts are kept beside ``out``."""

    model: Path
    out: Path
    lens: str | None = None
    corpus: Path | None = None
    device: str = "cpu"
    # The inputs that all parts share. Parts of others are refused.
    run: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Make one part, unless it is finished."""
        part = Parts(self.out, world_size).part(rank)
        with writing(part):
            if not part.is_dir():
                with atomic_directory(part) as directory:
                    self.make(directory, rank, world_size)
                    write_json(directory / RUN_FILE, self.run)

    @abstractmethod
    def make(self, directory: Path, rank: int, world_size: int) -> None:
        """Write the files of a part."""

    def open(self) -> PrismLM:
        """Open the model."""
        return load(self.model, lens=self.lens, corpus=self.corpus, device=self.device)

    def make_all(
        self, lm: PrismLM, run: dict[str, Any], count: int, *, overwrite: bool, **how: Any
    ) -> list[Path]:
        """Have the missing parts made, and return all; ``overwrite`` discards those of others."""
        run["lens"] = None if lm.lens is None else key_of(lm.lens.meta.files)
        # Another version, or device, may round differently.
        run |= {"prismlm": prismlm.__version__, "device": device_named(self.device)}
        job = replace(located(self, "model", "corpus"), out=self.out.absolute(), run=run)
        parts = Parts(job.out, count)
        parts.check(run, overwrite=overwrite)
        run_parts(job, count, gpus=run["device"] == "cuda", **how)
        return [parts.part(number) for number in range(count)]


def _share(total: int, rank: int, world_size: int, run: int = 1) -> tuple[int, int]:
    """Return the first text of a part and the one after its last; runs of texts stay together."""
    runs = -(-total // run)
    first, last = (runs * number // world_size * run for number in (rank, rank + 1))
    return first, min(last, total)


@dataclass(frozen=True)
class TraceJob(_Job):
    """Texts to explain: prompts, each with the tokens to generate, as :meth:`PrismLM.explain`."""

    texts: tuple[tuple[Any, int], ...] = ()
    temperature: float = 0.0
    seed: int = 0

    def make(self, directory: Path, rank: int, world_size: int) -> None:
        """Explain the texts of a part."""
        lm, (first, last) = self.open(), _share(len(self.texts), rank, world_size)
        traces = (
            lm.explain(prompt, generate=tokens, temperature=self.temperature, seed=self.seed)
            for prompt, tokens in self.texts[first:last]
        )
        write_rows(table_rows(traces, first), directory / ROWS_FILE)


def explain_in_parts(job: TraceJob, count: int, *, overwrite: bool = False, **how: Any) -> None:
    """Explain texts in parts, and write a row per step and prototype in use to ``job.out``.

    ``how`` are engine, workers and progress of :func:`prismlm.parts.run_parts`, whose errors these
    are. Finished parts are not made again; of other inputs, they are refused with InputError, or
    discarded with ``overwrite``.
    """
    # On the CPU, since the first worker needs the GPU.
    lm = replace(job, device="cpu").open()
    run = {
        "model": fingerprints.of_model(lm.model),
        "texts": fingerprints.of_json(job.texts),
        "temperature": job.temperature,
        "seed": job.seed,
    }
    parts = job.make_all(lm, run, count, overwrite=overwrite, **how)
    files = [part / ROWS_FILE for part in parts]
    # A column without a value has no type in the file of a part.
    schema = pa.unify_schemas([pq.read_schema(file) for file in files])
    with output_file(job.out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for batch in ds.dataset(list(map(str, files)), schema=schema).to_batches():
            writer.write_batch(batch)
    discard(parts[0].parent)


@dataclass(frozen=True)
class AuditJob(_Job):
    """Files of texts to audit, with the options of :class:`DocumentReader` and :class:`Audit`."""

    files: tuple[Path, ...] = ()
    columns: Columns = field(default_factory=Columns)
    skip_bad_rows: bool = False
    where: Where | None = None
    window: int | None = None
    texts: int = 0  # how many there are, once they have been read

    def make(self, directory: Path, rank: int, world_size: int) -> None:
        """Audit the texts of a part."""
        audit = self.empty()
        texts = self.reader(audit.lm.tokenizer)
        own = islice(texts, *_share(self.texts, rank, world_size, RUN_LENGTH))
        write_audit(audit.read(own), [directory / ROWS_FILE])
        audit.save(directory)

    def empty(self) -> Audit:
        """Open the model, and return an audit without texts."""
        return Audit(self.open(), window=self.window, where=self.where)

    def reader(self, tokenizer: PreTrainedTokenizerBase | None = None) -> DocumentReader:
        """Return the texts; chats need a tokenizer."""
        return DocumentReader(
            list(self.files),
            self.columns,
            tokenizer=tokenizer,
            skip_bad_rows=self.skip_bad_rows,
            answered_chats="last",
        )


def audit_in_parts(
    job: AuditJob, count: int, paths: Sequence[Path] = (), *, overwrite: bool = False, **how: Any
) -> tuple[Audit, dict[str, int]]:
    """Audit texts in parts, and write all rows to ``paths``, by default to the job's ``out``.

    Returned are the sums, and how many texts were left out, by reason. The rest is as of
    :func:`explain_in_parts`.
    """
    files = tuple(path.absolute() if path.exists() else path for path in job.files)
    job = replace(job, files=files)
    audit = replace(job, device="cpu").empty()
    reader = job.reader(audit.lm.tokenizer)
    # This reports a bad row before a worker starts.
    job = replace(job, texts=sum(1 for _ in reader))
    run = {
        "prototypes": audit.lens.meta.prototypes,
        "corpus": audit.lens.meta.corpus,
        "window": audit.window,
        "where": {column: list(values) for column, values in audit.where},
        "columns": asdict(job.columns),
        "skip_bad_rows": job.skip_bad_rows,
        "texts": [fingerprints.of_file(file.path) for file in reader.files],
        "count": job.texts,
    }
    parts = job.make_all(audit.lm, run, count, overwrite=overwrite, **how)
    for part in parts:
        audit.add_saved(part)
    rows = ds.dataset([str(part / ROWS_FILE) for part in parts]).to_batches()
    write_audit((row for batch in rows for row in batch.to_pylist()), paths or [job.out])
    discard(parts[0].parent)
    return audit, dict(reader.left_out)
