"""prismlm index: read a corpus once and keep what each prototype stands for in it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from prismlm.cli import options as opt
from prismlm.cli.corpus import DataFiles, Dataset, dataset_of
from prismlm.cli.options import flag, is_first_process, option
from prismlm.cli.output import print_cost, print_facts, print_json
from prismlm.errors import InputError, check_choice

if TYPE_CHECKING:
    from prismlm.corpus import Columns, Corpus, HubDataset
    from prismlm.cost import Cost
    from prismlm.lens.options import IndexOptions, Shard
    from prismlm.models.checkpoint import Checkpoint
    from prismlm.progress import Reporter

CORPORA = "corpora"
# Of a corpus that is streamed: the most that an interruption loses.
SHARD_TOKENS = 2**24

ReadOrWritten = Annotated[Path | None, option("DIR", "To read, or to write from --dataset.")]
NewLens = Annotated[str | None, option("NAME|DIR", "Default: the corpus's name.")]
ColumnNames = Annotated[list[str] | None, option("ROLE=NAME", "Such as text=body; repeatable.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).")]
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
    from prismlm.lens.build import IndexOptions, check_lens, lens_directory, options_for
    from prismlm.lens.codes import check_codes
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.models.device import device_named, uses_bf16

    streamed = dataset_of(dataset, None, dataset_split, data_files)
    source = _source(model, corpus, streamed, column or [], skip_bad_rows)
    out = lens_directory(model, lens or source.name)
    part = _shard(shard)
    where = _own_device(device_named(device))
    options = IndexOptions(
        contexts=contexts,
        window=window or 0,
        stride=stride or 0,
        split=split,
        with_text=text,
        positions=positions,
        codes=check_codes(codes),
        bf16=uses_bf16(precision, where),
        shard=part,
    )
    check_lens(out, overwrite=overwrite)
    checkpoint = load_checkpoint(model, device=where)
    options = options_for(checkpoint.model, options, model)
    if dry_run:
        print_cost(_cost(model, source, checkpoint, options), as_json=as_json)
        return
    _run(model, source, checkpoint, out, options, overwrite=overwrite, as_json=as_json)


class _Dataset(NamedTuple):
    """A dataset, which becomes a corpus with the model's tokenizer before it is read."""

    dataset: HubDataset
    columns: Columns
    out: Path
    skip_bad_rows: bool

    @property
    def name(self) -> str:
        return self.out.resolve().name


def _own_device(name: str) -> str:
    """Return the GPU of this process, where several read one part each."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank else name


def _source(
    model: Path,
    corpus: Path | None,
    dataset: HubDataset | None,
    columns: list[str],
    skip_bad_rows: bool,
) -> Corpus | _Dataset:
    from prismlm.corpus import Corpus

    if dataset is not None:
        parts = (dataset.label, dataset.config, dataset.split)
        out = corpus or model / CORPORA / "-".join(filter(None, parts))
        return _Dataset(dataset, _columns(columns), out, skip_bad_rows)
    if corpus is None:
        raise InputError("nothing to read: name a --corpus, or a --dataset to make one of.")
    return Corpus.open(corpus)


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


def _run(
    model: Path,
    source: Corpus | _Dataset,
    checkpoint: Checkpoint,
    out: Path,
    options: IndexOptions,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus.tokenizer import tokenizer_fingerprint
    from prismlm.lens.build import build_index, check_index, trained_on
    from prismlm.lens.convergence import lens_summary
    from prismlm.progress import SILENT

    reporter = ConsoleReporter() if is_first_process() else SILENT
    corpus = source
    if isinstance(corpus, _Dataset):
        corpus = _streamed(model, corpus, wait=options.shard.count > 1, reporter=reporter)
    fingerprint = tokenizer_fingerprint(checkpoint.tokenizer)
    check_index(checkpoint.model, corpus, options, fingerprint)
    began = time.monotonic()
    written = build_index(
        checkpoint.model,
        checkpoint.sidecar.head,
        corpus,
        out,
        options,
        trained_on=trained_on(checkpoint, corpus),
        overwrite=overwrite,
        progress=reporter,
    )
    if written:
        seconds = round(time.monotonic() - began, 1)
        summary = {"lens": str(out), **lens_summary(out), "seconds": seconds}
        print_json(summary) if as_json else print_facts(summary)
    elif "WORLD_SIZE" not in os.environ:
        _report_part(out, options.shard, as_json=as_json)


def _streamed(model: Path, source: _Dataset, *, wait: bool, reporter: Reporter) -> Corpus:
    """Return the corpus of a dataset, building it where it is not there, or not whole."""
    from prismlm.corpus import build_corpus
    from prismlm.run_state import orderly_end

    with orderly_end():
        return build_corpus(
            source.dataset,
            source.out,
            tokenizer=model,
            columns=source.columns,
            shard_tokens=SHARD_TOKENS,
            skip_bad_rows=source.skip_bad_rows,
            reuse=True,
            wait=wait,
            progress=reporter,
        )


def _cost(
    path: Path, source: Corpus | _Dataset, checkpoint: Checkpoint, options: IndexOptions
) -> Cost:
    """Return what an index would cost, and the building of its corpus if that is not there."""
    from prismlm.corpus.build import existing_corpus, open_reader
    from prismlm.corpus.estimate import built, cost_of, draw
    from prismlm.corpus.tokenizer import load_tokenizer
    from prismlm.lens.build import estimate_index

    model, head = checkpoint.model, checkpoint.sidecar.head
    if not isinstance(source, _Dataset):
        return estimate_index(model, head, source, options)
    dataset, columns, out, skip_bad_rows = source
    tokenizer = load_tokenizer(path)
    there = existing_corpus(dataset, out, tokenizer, columns)
    if there is not None:
        return estimate_index(model, head, there, options)
    sample = draw(open_reader(dataset, columns, skip_bad_rows, tokenizer))
    before = replace(cost_of(sample, tokenizer), name="corpus")
    with built(sample, tokenizer) as corpus:
        cost = estimate_index(model, head, corpus, options, sample.scale)
    return replace(cost, parts=(before,), unknown=before.unknown)


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


def _report_part(out: Path, part: Shard, *, as_json: bool) -> None:
    from prismlm.lens.build import Parts

    parts, every = Parts(out, part.count), range(1, part.count + 1)
    # The others may have ended at the same time, and written the lens.
    done = [n + 1 for n in parts.complete()] if parts.path.is_dir() else list(every)
    left = sorted(set(every) - set(done))
    if as_json:
        print_json({"lens": None, "shards": part.count, "done": done, "left": left})
    else:
        numbers = ", ".join(map(str, left)) or "none"
        typer.echo(f"Part {part.number + 1} of {part.count} is done; left: {numbers}.")
