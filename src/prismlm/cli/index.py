"""prismlm index: read a corpus once and keep what each prototype stands for in it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.corpus import DataFiles, Dataset, dataset_of
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError, check_choice
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus import Columns, Corpus
    from prismlm.cost import Cost
    from prismlm.lens.options import IndexOptions, Shard
    from prismlm.models.checkpoint import Checkpoint

# Of a corpus that is streamed: the most that an interruption loses.
SHARD_TOKENS = 2**24

ReadOrWritten = Annotated[Path | None, option("DIR", "To read, or to write from --dataset.")]
NewLens = Annotated[str | None, option("NAME|DIR", "Default: the corpus's name.")]
ColumnNames = Annotated[list[str] | None, option("ROLE=NAME", "Such as text=body; repeatable.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).", min=1)]
WithText = Annotated[bool, flag("--text/--no-text", "Keep the text around each place, or offsets.")]
Part = Annotated[str | None, option("I/N", "Read one of N parts; the last one writes the lens.")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace a lens, or one that was begun otherwise.")]


def index(
    model: opt.Model,
    corpus: ReadOrWritten = None,
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
    shard: Part = None,
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    overwrite: Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Find the text each prototype stands for, so that explain can point to it.

    Finished parts are kept: run the same command again to resume an index in parts (--shard), or
    one that streams a dataset into a corpus. Under torchrun every process reads one part.
    """
    from prismlm.lens.build import check_lens, index_checkpoint, lens_directory
    from prismlm.lens.codes import check_codes
    from prismlm.lens.options import IndexOptions, options_for
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.models.device import device_named, uses_bf16

    streamed = dataset_of(dataset, None, dataset_split, data_files)
    source = _source(model, corpus, streamed, column or [], skip_bad_rows)
    where, part = _own_device(device_named(device)), _shard(shard)
    kept = (contexts, window or 0, stride or 0, split, text, positions, check_codes(codes))
    options = IndexOptions(*kept, bf16=uses_bf16(precision, where), shard=part)
    out = lens_directory(model, lens or source.name)
    check_lens(out, overwrite=overwrite)
    checkpoint = load_checkpoint(model, device=where)
    # What the model cannot read is refused before a dataset is streamed.
    options = options_for(checkpoint.model, options, model)
    if dry_run:
        output.print_cost(_cost(checkpoint, source, options), as_json=as_json)
        return
    how: dict[str, Any] = {"progress": ConsoleReporter() if opt.is_first_process() else SILENT}
    if isinstance(source, _Streamed):
        source = source.build(wait=part.count > 1, **how)
    began = time.monotonic()
    written = index_checkpoint(checkpoint, source, out, options, overwrite=overwrite, **how)
    if written or "WORLD_SIZE" not in os.environ:
        _report(written, out, part, time.monotonic() - began, as_json=as_json)


def _source(
    model: Path, corpus: Path | None, dataset: Any, columns: list[str], skip_bad_rows: bool
) -> Corpus | _Streamed:
    from prismlm.corpus import Corpus

    if dataset is not None:
        return _Streamed(model, dataset, _columns(columns), corpus, skip_bad_rows)
    if corpus is None:
        raise InputError("nothing to read: name a --corpus, or a --dataset to make one of.")
    return Corpus.open(corpus)


class _Streamed:
    """A dataset, which becomes a corpus with the model's tokenizer before it is read."""

    def __init__(
        self, model: Path, dataset: Any, columns: Columns, out: Path | None, skip_bad_rows: bool
    ) -> None:
        self.model, self.dataset, self.columns = model, dataset, columns
        parts = filter(None, (dataset.label, dataset.config, dataset.split))
        self.out = out or model / "corpora" / "-".join(parts)
        self.skip_bad_rows = skip_bad_rows
        self.name = self.out.resolve().name

    def build(self, *, wait: bool, progress: Reporter) -> Corpus:
        """Return the corpus, building it where it is not there, or not whole."""
        from prismlm.corpus import build_corpus

        how: dict[str, Any] = {"skip_bad_rows": self.skip_bad_rows, "columns": self.columns}
        how |= {"shard_tokens": SHARD_TOKENS, "reuse": True, "wait": wait}
        with orderly_end():
            return build_corpus(
                self.dataset, self.out, tokenizer=self.model, progress=progress, **how
            )


def _cost(checkpoint: Checkpoint, source: Corpus | _Streamed, options: IndexOptions) -> Cost:
    """Return what an index would cost, and the building of its corpus if that is not there."""
    from prismlm.corpus.build import existing_corpus, open_reader
    from prismlm.corpus.estimate import built, cost_of, draw
    from prismlm.corpus.tokenizer import load_tokenizer
    from prismlm.lens.build import estimate_index

    opened, head = checkpoint.model, checkpoint.sidecar.head
    if not isinstance(source, _Streamed):
        return estimate_index(opened, head, source, options)
    dataset, columns, tokenizer = source.dataset, source.columns, load_tokenizer(source.model)
    there = existing_corpus(dataset, source.out, tokenizer, columns)
    if there is not None:
        return estimate_index(opened, head, there, options)
    sample = draw(open_reader(dataset, columns, source.skip_bad_rows, tokenizer))
    before = replace(cost_of(sample, tokenizer), name="corpus")
    with built(sample, tokenizer) as corpus:
        cost = estimate_index(opened, head, corpus, options, sample.scale)
    return replace(cost, parts=(before,), unknown=before.unknown)


def _own_device(name: str) -> str:
    """Return the GPU of this process, where several read one part each."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank else name


def _columns(named: list[str]) -> Columns:
    from prismlm.corpus import Columns

    given: dict[str, Any] = {}
    for pair in named:
        role, equals, name = pair.partition("=")
        if not equals:
            raise InputError(f"--column {pair}: expected ROLE=NAME, for example text=body.")
        check_choice("--column", role, [field.name for field in fields(Columns)])
        given[role] = name
    return Columns(**given)


def _shard(shard: str | None) -> Shard:
    """Return which part to read: one that is named, one of torchrun's, or all."""
    from prismlm.lens.options import Shard

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if shard is None:
        return Shard(int(os.environ.get("RANK", "0")), processes)
    if processes > 1:
        raise InputError("--shard and torchrun both choose a part: use one of them.")
    part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        raise InputError(f"--shard {shard}: expected I/N, for example 3/8, the third of eight.")
    return Shard(int(part[1]) - 1, int(part[2]))


def _report(written: Path | None, out: Path, part: Shard, seconds: float, *, as_json: bool) -> None:
    """Print what a lens holds, or which parts of it are left."""
    from prismlm.lens.build import Parts
    from prismlm.lens.convergence import lens_summary

    if written is not None:
        summary = {"lens": str(out), **lens_summary(out), "seconds": round(seconds, 1)}
        output.print_json(summary) if as_json else output.print_facts(summary)
        return
    parts, every = Parts(out, part.count), range(1, part.count + 1)
    # The others may have ended at the same time, and written the lens.
    done = [n + 1 for n in parts.complete()] if parts.path.is_dir() else list(every)
    left = sorted(set(every) - set(done))
    if as_json:
        output.print_json({"lens": None, "shards": part.count, "done": done, "left": left})
    else:
        numbers = ", ".join(map(str, left)) or "none"
        typer.echo(f"Part {part.number + 1} of {part.count} is done; left: {numbers}.")
