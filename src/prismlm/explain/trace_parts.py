"""Explanations of many texts in parts, made by workers: ``prismlm explain --file --workers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.explain.language_model import PrismLM, load
from prismlm.explain.rows import write_rows
from prismlm.files import atomic_directory, discard, write_json
from prismlm.lens.layout import key_of
from prismlm.models.device import device_named
from prismlm.outputs import output_file
from prismlm.parts import Engine, Parts, located, run_parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, writing

ROWS_FILE = "rows.parquet"


@dataclass(frozen=True)
class TracePart:
    """Some of the texts, as a step of datatrove; finished parts are kept beside ``out``.

    ``texts`` are prompts, each with the tokens to generate; the other arguments are those of
    :func:`prismlm.load` and of :meth:`PrismLM.explain`.
    """

    model: Path
    texts: tuple[tuple[Any, int], ...]
    out: Path
    lens: str | None = None
    corpus: Path | None = None
    device: str = "cpu"
    temperature: float = 0.0
    seed: int = 0

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Explain the texts of a part, unless it is finished."""
        part = Parts(self.out, world_size).part(rank)
        with writing(part):
            if part.is_dir():
                return
            lm = self.open()
            first, last = (len(self.texts) * n // world_size for n in (rank, rank + 1))
            settings: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed}
            rows = (
                {"text": number} | row
                for number in range(first, last)
                for prompt, tokens in [self.texts[number]]
                for step in lm.explain(prompt, generate=tokens, **settings)
                for row in step.rows()
            )
            with atomic_directory(part) as directory:
                write_rows(rows, directory / ROWS_FILE)
                write_json(directory / RUN_FILE, self.run(lm))

    def open(self) -> PrismLM:
        """Open the model."""
        return load(self.model, lens=self.lens, corpus=self.corpus, device=self.device)

    def run(self, lm: PrismLM) -> dict[str, Any]:
        """Return what all parts share."""
        return {
            "model": fingerprints.of_model(lm.model),
            "lens": None if lm.lens is None else key_of(lm.lens.meta.files),
            "texts": fingerprints.of_json(self.texts),
            "temperature": self.temperature,
            "seed": self.seed,
            # Another version, or device, may round differently.
            "prismlm": prismlm.__version__,
            "device": device_named(self.device),
        }


def explain_in_parts(
    part: TracePart,
    count: int,
    *,
    engine: Engine = "local",
    workers: int = 1,
    overwrite: bool = False,
    progress: Reporter = SILENT,
) -> None:
    """Explain texts in parts, and write a row per step and prototype in use to ``part.out``.

    Finished parts are not made again; ``overwrite`` discards those of other inputs. Errors are
    those of :func:`prismlm.parts.run_parts`, and InputError for such parts.
    """
    part = replace(located(part, "model", "corpus"), out=part.out.absolute())
    parts = Parts(part.out, count)
    gpus = device_named(part.device) == "cuda"
    # On the CPU, since the first worker needs the GPU.
    parts.check(part.run(replace(part, device="cpu").open()), overwrite=overwrite)
    run_parts(part, count, engine=engine, workers=workers, gpus=gpus, progress=progress)
    _put_together([parts.part(number) / ROWS_FILE for number in range(count)], part.out)
    discard(parts.path)


def _put_together(files: Sequence[Path], out: Path) -> None:
    """Write the rows of several files to one; a column that one lacks is null there."""
    # A column without a value has no type in the file of a part.
    schema = pa.unify_schemas([pq.read_schema(file) for file in files])
    batches = ds.dataset([str(file) for file in files], schema=schema).to_batches()
    with output_file(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
