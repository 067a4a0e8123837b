"""An index made by workers: each reads parts of a corpus, and the last part writes the lens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prismlm.lens.build import check_lens, index
from prismlm.lens.options import IndexOptions, Shard
from prismlm.models.device import device_named
from prismlm.parts import Engine, Parts, run_parts
from prismlm.progress import SILENT, Reporter


@dataclass(frozen=True)
class IndexPart:
    """One part of an index, as a step of datatrove; arguments are those of :func:`index`."""

    model: Path
    corpus: Path
    lens: Path
    options: IndexOptions = field(default_factory=IndexOptions)
    device: str = "auto"
    overwrite: bool = False

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a part, unless it is finished; write the lens if it was the last."""
        parts = Parts(self.lens, world_size)
        if parts.part(rank).is_dir() and len(parts.complete()) < world_size:
            return
        options = replace(self.options, shard=Shard(rank, world_size))
        how: dict[str, Any] = {"device": self.device, "overwrite": self.overwrite}
        index(self.model, self.corpus, self.lens, options, **how)


def index_in_parts(
    part: IndexPart,
    count: int,
    *,
    engine: Engine = "local",
    workers: int = 1,
    progress: Reporter = SILENT,
) -> Path:
    """Index a corpus in parts; finished ones, also of an interrupted run, are not read again.

    The lens is the same, byte for byte, whatever the engine and the numbers of parts and workers.
    Errors are those of :func:`prismlm.parts.run_parts` and :func:`prismlm.lens.build.index`.
    """
    check_lens(part.lens, overwrite=part.overwrite)
    gpus = device_named(part.device) == "cuda"
    run_parts(part, count, engine=engine, workers=workers, gpus=gpus, progress=progress)
    if Parts(part.lens, count).path.is_dir():  # no worker saw that its part was the last
        part(None, 0, count)
    return part.lens
