"""prismlm index: read a corpus once and store the text that each prototype stands for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.progress import SILENT

if TYPE_CHECKING:
    from prismlm.lens.options import Shard

CorpusDir = Annotated[Path, option("DIR", "The corpus.")]
NewLens = Annotated[str | None, option("NAME|DIR", "Default: the corpus's name.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).", min=1)]
WithText = Annotated[bool, flag("--text/--no-text", "Store the text of contexts, or only offsets.")]


def index(
    model: opt.Model,
    corpus: CorpusDir,
    lens: NewLens = None,
    contexts: opt.Contexts = 64,
    window: Window = None,
    stride: opt.Stride = None,
    split: opt.Split = "train",
    text: WithText = True,
    positions: opt.PositionShare = 1.0,
    codes: opt.Codes = "int8",
    shard: opt.Part = None,
    parts: opt.PartCount = None,
    workers: opt.Workers = None,
    engine: opt.Engine = "local",
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Find the text each prototype stands for, so that explain can point to it.

    Finished parts are kept: run again to resume. Under torchrun every process reads one part.
    """
    from prismlm.corpus import Corpus
    from prismlm.lens import build
    from prismlm.lens.codes import check_codes
    from prismlm.lens.options import IndexOptions, Shard, options_for
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.models.device import device_named, uses_bf16

    source = Corpus.open(corpus)
    place, part = _local_device(device_named(device)), Shard(*opt.parse_shard(shard))
    count = opt.count_parts(parts, workers, engine, shard)
    sizes = (contexts, window or 0, stride or 0, split, text, positions, check_codes(codes))
    options = IndexOptions(*sizes, bf16=uses_bf16(precision, place), shard=part)
    out = build.lens_directory(model, lens or source.name)
    build.check_lens(out, overwrite=overwrite)
    if dry_run:
        checkpoint = load_checkpoint(model, device=place)
        options = options_for(checkpoint.model, options, model)
        head = checkpoint.sidecar.head
        cost = build.estimate_index(checkpoint.model, head, source, options)
        output.print_cost(cost, as_json=as_json)
        return
    start = time.monotonic()
    how: dict[str, Any] = {"progress": ConsoleReporter() if opt.is_first_process() else SILENT}
    if count:
        one = build.IndexPart(model, source.path, out, options, device, overwrite)
        written = build.index_in_parts(one, count, engine=engine, workers=workers or 1, **how)
    else:
        how |= {"device": place, "overwrite": overwrite}
        written = build.index(model, source, out, options, **how)
    if written or "WORLD_SIZE" not in os.environ:
        _report(written, out, part, time.monotonic() - start, as_json=as_json)


def _local_device(name: str) -> str:
    """Return the GPU of this process where several read one part each."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank else name


def _report(written: Path | None, out: Path, part: Shard, seconds: float, *, as_json: bool) -> None:
    from prismlm.lens.inspection import lens_summary

    if written is None:
        output.report_part("lens", out, part.number, part.count, as_json=as_json)
        return
    summary = {"lens": str(out), **lens_summary(out), "seconds": round(seconds, 1)}
    output.show(summary, as_json, lambda: output.print_facts(summary))
