"""An index made by workers: they read parts of a corpus, then write ranges of cells.

A last step, of one process, writes what does not grow with the corpus, and documents.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prismlm.lens.assembly import Assembly
from prismlm.lens.build import check_lens, index
from prismlm.lens.options import IndexOptions, Shard
from prismlm.models.device import device_named
from prismlm.parts import Engine, Parts, run_parts
from prismlm.progress import SILENT, Reporter


@dataclass(frozen=True)
class IndexPart:
    """One part of an index, as a step of datatrove; arguments are those of :func:`index`.

    ``lens`` is a directory. With ``merge``, the last part to be finished writes the lens; without
    it, a part that another process reads is waited for.
    """

    model: Path
    corpus: Path
    lens: Path
    options: IndexOptions = field(default_factory=IndexOptions)
    device: str = "auto"
    overwrite: bool = False
    merge: bool = True

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a part, unless it is finished."""
        # With ``overwrite`` a finished part may be of other inputs, and is checked.
        finished = Parts(self.lens, world_size).part(rank).is_dir()
        if self.merge or self.overwrite or not finished:
            options = replace(self.options, shard=Shard(rank, world_size))
            how: dict[str, Any] = {"overwrite": self.overwrite, "device": self.device}
            how |= {"merge": self.merge, "wait": not self.merge}
            index(self.model, self.corpus, self.lens, options, **how)


def index_in_parts(
    part: IndexPart,
    count: int,
    *,
    engine: Engine = "local",
    workers: int = 1,
    progress: Reporter = SILENT,
) -> Path:
    """Index a corpus in parts, and then ranges of cells; finished ones are not made again.

    On machines of one kind the lens is the same, byte for byte, whatever the engine and the numbers
    of parts and workers; with bf16 on CPUs, at equal numbers of threads. Errors are those of
    :func:`prismlm.parts.run_parts` and :func:`prismlm.lens.build.index`.
    """
    # Workers may have another current directory.
    paths = {name: getattr(part, name).absolute() for name in ("model", "corpus", "lens")}
    part = replace(part, **paths)
    check_lens(part.lens, overwrite=part.overwrite)
    gpus = device_named(part.device) == "cuda"
    how: dict[str, Any] = {"engine": engine, "workers": workers, "progress": progress}
    run_parts(replace(part, merge=False), count, gpus=gpus, **how)
    text = part.corpus if part.options.with_text else None
    jobs = Assembly(part.lens, count, part.options.range_bytes, text, part.options.split)
    if jobs.divided:  # the last step does few jobs
        how["workers"] = min(workers, len(jobs.jobs))
        # A copy, without what it has read, since it is sent with each job.
        counted = replace(jobs, counts=Counter(job.kind for job in jobs.jobs))
        run_parts(counted, len(jobs.jobs), name="Files", **how)
    replace(part, merge=True)(None, 0, count)
    return part.lens
