"""prismlm index: read a corpus once and store the text that each prototype stands for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.corpus import DataFiles, Dataset, open_dataset
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError, check_choice
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus import Columns, Corpus
    from prismlm.cost import Cost
    from prismlm.lens.build import IndexPart
    from prismlm.lens.options import IndexOptions, Shard
    from prismlm.models.checkpoint import Checkpoint

CorpusDir = Annotated[Path | None, option("DIR", "The corpus; with --dataset, its destination.")]
NewLens = Annotated[str | None, option("NAME|DIR", "Default: the corpus's name.")]
ColumnNames = Annotated[list[str] | None, option("ROLE=NAME", "Such as text=body; repeatable.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).", min=1)]
WithText = Annotated[bool, flag("--text/--no-text", "Store the text of contexts, or only offsets.")]


def index(
    model: opt.Model,
    corpus: CorpusDir = None,
    lens: NewLens = None,
    dataset: Dataset = None,
    dataset_split: Annotated[str, option("NAME", "The dataset's split to read.")] = "train",
    data_files: DataFiles = None,
    column: ColumnNames = None,
    skip_bad_rows: opt.SkipBadRows = False,
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

    Finished parts are kept: run the same command again to resume an index in parts (--parts,
    --shard), or one that streams a dataset into a corpus. Under torchrun every process reads one
    part.
    """
    from prismlm.lens.build import IndexPart, check_lens, lens_directory
    from prismlm.lens.codes import check_codes
    from prismlm.lens.options import IndexOptions, Shard, options_for
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.models.device import device_named, uses_bf16

    hub_dataset = open_dataset(dataset, None, dataset_split, data_files)
    source = _source(model, hub_dataset, corpus, column, skip_bad_rows)
    place, part = _local_device(device_named(device)), Shard(*opt.parse_shard(shard))
    count = opt.count_parts(parts, workers, engine, shard)
    sizes = (contexts, window or 0, stride or 0, split, text, positions, check_codes(codes))
    options = IndexOptions(*sizes, bf16=uses_bf16(precision, place), shard=part)
    out = lens_directory(model, lens or source.name)
    check_lens(out, overwrite=overwrite)
    # With workers, this process only checks the model, and leaves the GPUs to them.
    checkpoint = load_checkpoint(model, device="cpu" if count else place)
    # Refuses windows that the model cannot read, before a dataset is streamed.
    options = options_for(checkpoint.model, options, model)
    if dry_run:
        _print_estimate(checkpoint, source, options, as_json)
        return
    start, one = time.monotonic(), IndexPart(model, Path(), out, options, device, overwrite)
    opened = None if count else checkpoint
    del checkpoint  # workers open their own
    written = _write(one, source, opened, count or 1, engine=engine, workers=workers or 1)
    if written or "WORLD_SIZE" not in os.environ:
        _report(written, out, part, time.monotonic() - start, as_json=as_json)


def _write(
    one: IndexPart,
    source: Corpus | _Stream,
    checkpoint: Checkpoint | None,
    count: int,
    **how: Any,
) -> Path | None:
    """Write a lens, or a part of it, in this process; without a checkpoint by workers."""
    from prismlm.lens.build import index_checkpoint, index_in_parts

    how["progress"] = ConsoleReporter() if opt.is_first_process() else SILENT
    if isinstance(source, _Stream):
        source = source.build(how["progress"], wait=one.options.shard.count > 1)
    if checkpoint is None:
        return index_in_parts(replace(one, corpus=source.path), count, **how)
    how = {"progress": how["progress"], "overwrite": one.overwrite}
    return index_checkpoint(checkpoint, source, one.lens, one.options, **how)


def _print_estimate(
    checkpoint: Checkpoint, source: Corpus | _Stream, options: IndexOptions, as_json: bool
) -> None:
    from prismlm.lens.build import estimate_index

    head = checkpoint.sidecar.head
    estimate = partial(estimate_index, checkpoint.model, head, options=options)
    cost = source.estimate(estimate) if isinstance(source, _Stream) else estimate(source)
    output.print_cost(cost, as_json=as_json)


def _source(
    model: Path, dataset: Any, corpus: Path | None, columns: list[str] | None, skip: bool
) -> Corpus | _Stream:
    """Return the dataset or the corpus to read."""
    from prismlm.corpus import Corpus

    if dataset is not None:
        return _Stream(model, dataset, corpus, _parse_columns(columns), skip)
    if columns or skip:
        raise InputError("--column and --skip-bad-rows need --dataset NAME.")
    if corpus is None:
        raise InputError("nothing to read: name a --corpus, or a --dataset to make one of.")
    return Corpus.open(corpus)


class _Stream:
    """A dataset, which becomes a corpus with the model's tokenizer before it is indexed."""

    def __init__(self, model: Path, dataset: Any, out: Any, columns: Columns, skip: bool) -> None:
        parts = filter(None, (dataset.label, dataset.config, dataset.split))
        self.model, self.dataset, self.columns, self.skip_bad_rows = model, dataset, columns, skip
        self.out: Path = out or model / "corpora" / "-".join(parts)
        self.name = self.out.resolve().name

    def build(self, progress: Reporter, *, wait: bool) -> Corpus:
        """Return the corpus, after building what is missing of it."""
        from prismlm.corpus import build_corpus

        settings: dict[str, Any] = {"columns": self.columns, "skip_bad_rows": self.skip_bad_rows}
        settings |= {"tokenizer": self.model, "progress": progress}
        with orderly_end():
            return build_corpus(self.dataset, self.out, **settings, reuse=True, wait=wait)

    def estimate(self, estimate_index: Callable[..., Cost]) -> Cost:
        """Return the cost of the index, and of its corpus if that is not built."""
        from prismlm.corpus import build, estimate
        from prismlm.corpus.part import open_reader
        from prismlm.corpus.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.model)
        existing = build.existing_corpus(self.dataset, self.out, tokenizer, self.columns)
        if existing is not None:
            return estimate_index(existing)
        how = self.columns, self.skip_bad_rows
        sample = estimate.draw_sample(open_reader(self.dataset, *how, tokenizer=tokenizer))
        corpus_cost = replace(estimate.estimate_from(sample, tokenizer), name="corpus")
        with estimate.sample_corpus(sample, tokenizer) as corpus:
            cost = estimate_index(corpus, scale=sample.scale)
        return replace(cost, parts=(corpus_cost,), unknown=corpus_cost.unknown)


def _local_device(name: str) -> str:
    """Return the GPU of this process where several read one part each."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank else name


def _parse_columns(pairs: list[str] | None) -> Columns:
    from prismlm.corpus import Columns

    columns: dict[str, Any] = {}
    for pair in pairs or []:
        role, equals, name = pair.partition("=")
        if not equals:
            raise InputError(f"--column {pair}: expected ROLE=NAME, for example text=body.")
        check_choice("--column", role, [field.name for field in fields(Columns)])
        columns[role] = name
    return Columns(**columns)


def _report(written: Path | None, out: Path, part: Shard, seconds: float, *, as_json: bool) -> None:
    from prismlm.lens.inspection import lens_summary

    if written is None:
        output.report_part("lens", out, part.number, part.count, as_json=as_json)
        return
    summary = {"lens": str(out), **lens_summary(out), "seconds": round(seconds, 1)}
    output.show(summary, as_json, lambda: output.print_facts(summary))
