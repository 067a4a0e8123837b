"""prismlm index: read a corpus once and keep what each prototype stands for in it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from prismlm.cli import corpus as data
from prismlm.cli.format import count, duration
from prismlm.cli.options import (
    Device,
    DryRun,
    Json,
    Model,
    Precision,
    SkipBadRows,
    Split,
    Stride,
    flag,
    is_first_process,
    needs,
    number,
    option,
)
from prismlm.cli.output import print_cost, print_json, print_rows
from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus import Columns, Corpus, HubDataset
    from prismlm.cost import Cost
    from prismlm.index.build import IndexOptions, Shard
    from prismlm.index.codes import CodeName
    from prismlm.models.checkpoint import Checkpoint
    from prismlm.progress import Reporter

CORPORA = "corpora"
# Of a corpus that is streamed: the most that an interruption loses.
SHARD_TOKENS = 2**24
LONGEST_DEFAULT_WINDOW = 1024


ReadOrWritten = Annotated[
    Path | None,
    option(
        "DIR",
        "The corpus to read, or to write from --dataset (default: MODEL/corpora/NAME).",
        "--corpus",
    ),
]
NewLens = Annotated[
    str | None, option("NAME|DIR", "Write MODEL/lens/NAME (default: the corpus's name).", "--lens")
]
Contexts = Annotated[int, number("L", "Places kept per prototype.", 1)]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).")]
WithText = Annotated[bool, flag("--text/--no-text", "Keep the text around each place, or offsets.")]
Part = Annotated[str | None, option("I/N", "Read one of N parts; the last one writes the lens.")]
PositionShare = Annotated[
    str,
    option(
        "SHARE|none", "Positions kept, so that explain finds passages: 1 keeps all, 0.1 a tenth."
    ),
]
CodesOfStates = Annotated[
    str,
    option(
        "NAME", "int8; pq, pq8 or pq12: a fourth to a twelfth of the size, less exact.", "--codes"
    ),
]
Overwrite = Annotated[bool, flag("--overwrite", "Replace a lens, or one that was begun otherwise.")]
SortMemory = Annotated[int, number("MB", "Memory to sort positions in; changes no byte.", 1)]
TokensPerBatch = Annotated[
    int, option("N", "Tokens ranked together; changes memory, not the result.")
]


def index(
    model: Model,
    corpus: ReadOrWritten = None,
    lens: NewLens = None,
    dataset: data.Dataset = None,
    dataset_config: data.DatasetConfig = None,
    data_files: data.DataFiles = None,
    dataset_split: Annotated[str, typer.Option(help="The dataset's split to read.")] = "train",
    text_column: data.TextColumn = "text",
    id_column: data.IdColumn = None,
    source_column: data.SourceColumn = None,
    domain_column: data.DomainColumn = None,
    license_column: data.LicenseColumn = None,
    title_column: data.TitleColumn = None,
    url_column: data.UrlColumn = None,
    split_column: data.SplitColumn = None,
    skip_bad_rows: SkipBadRows = False,
    contexts: Contexts = 64,
    window: Window = None,
    stride: Stride = None,
    split: Split = "train",
    text: WithText = True,
    positions: PositionShare = "1",
    codes: CodesOfStates = "int8",
    sort_memory: SortMemory = 32,
    shard: Part = None,
    tokens_per_batch: TokensPerBatch = 2**18,
    save_every: Annotated[float, number("SECONDS", "How often what was found is saved.")] = 60.0,
    device: Device = "auto",
    precision: Precision = "auto",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Find the text each prototype stands for, so that explain can point to it.

    Run the same command again to resume an index that was interrupted or killed, also while it
    streams a dataset into a corpus. Under torchrun every process reads one part.
    """
    from prismlm.corpus import Columns
    from prismlm.models.device import device_named, uses_bf16

    named = (source_column, domain_column, license_column, title_column, url_column, split_column)
    columns = Columns(text_column, id_column, *named)
    found = data.dataset_of(dataset, dataset_config, dataset_split, data_files)
    source = _source(model, corpus, found, columns, skip_bad_rows)
    out = _out(model, lens or source.name)
    where = _own_device(device_named(device))
    job = _Job(model, out, _shard(shard), overwrite, save_every, where)
    asked: dict[str, Any] = {
        "contexts": contexts,
        "split": split,
        "with_text": text,
        "tokens_per_batch": tokens_per_batch,
        "positions": positions_of(positions),
        "codes": codes_of(codes),
        "sort_bytes": sort_memory * 2**20,
        "bf16": uses_bf16(precision, job.device),
    }
    _run(job, source, window, stride, asked, dry_run=dry_run, as_json=as_json)


class _Job(NamedTuple):
    model: Path
    out: Path
    part: Shard
    overwrite: bool
    save_every: float
    device: str


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
    columns: Columns,
    skip_bad_rows: bool,
) -> Corpus | _Dataset:
    from prismlm.corpus import Corpus

    if dataset is not None:
        parts = (dataset.label, dataset.config, dataset.split)
        out = corpus or model / CORPORA / "-".join(filter(None, parts))
        return _Dataset(dataset, columns, out, skip_bad_rows)
    if corpus is None:
        raise InputError("nothing to read: name a --corpus, or a --dataset to make one of.")
    return Corpus.open(corpus)


def _run(
    job: _Job,
    source: Corpus | _Dataset,
    window: int | None,
    stride: int | None,
    asked: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus.tokenizer import tokenizer_fingerprint
    from prismlm.index.build import (
        IndexOptions,
        build_index,
        check_lens,
        check_window_and_batches,
    )
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.progress import SILENT

    check_lens(job.out, overwrite=job.overwrite)
    checkpoint = load_checkpoint(job.model, device=job.device)
    model, head = checkpoint.model, checkpoint.sidecar.head
    width = _default_window(job.model, model) if window is None else window
    stride = max(1, width * 3 // 4) if stride is None else stride
    options = IndexOptions(window=width, stride=stride, **asked)
    check_window_and_batches(model, options)
    if dry_run:
        print_cost(_cost(job, source, checkpoint, options), as_json=as_json)
        return
    reporter = ConsoleReporter() if is_first_process() else SILENT
    corpus = _streamed(job, source, reporter) if isinstance(source, _Dataset) else source
    began = time.monotonic()
    written = build_index(
        model,
        head,
        corpus,
        job.out,
        options,
        job.part,
        trained_on=_trained_on(checkpoint, corpus),
        tokenizer=tokenizer_fingerprint(checkpoint.tokenizer),
        overwrite=job.overwrite,
        save_seconds=job.save_every,
        progress=reporter,
    )
    _say(job, written is not None, time.monotonic() - began, as_json=as_json)


def _streamed(job: _Job, source: _Dataset, reporter: Reporter) -> Corpus:
    """Return the corpus of a dataset, building it where it is not there, or not whole."""
    from prismlm.corpus import build_corpus
    from prismlm.run_state import orderly_end

    with orderly_end():
        return build_corpus(
            source.dataset,
            source.out,
            tokenizer=job.model,
            columns=source.columns,
            shard_tokens=SHARD_TOKENS,
            skip_bad_rows=source.skip_bad_rows,
            reuse=True,
            wait=job.part.count > 1,
            progress=reporter,
        )


def _cost(
    job: _Job, source: Corpus | _Dataset, checkpoint: Checkpoint, options: IndexOptions
) -> Cost:
    """Return what an index would cost, and the building of its corpus if that is not there."""
    from prismlm.corpus.build import existing_corpus
    from prismlm.corpus.tokenizer import load_tokenizer
    from prismlm.index.estimate import estimate_dataset_index, estimate_index

    model, head = checkpoint.model, checkpoint.sidecar.head
    if isinstance(source, _Dataset):
        dataset, columns, out, skip_bad_rows = source
        tokenizer = load_tokenizer(job.model)
        there = existing_corpus(dataset, out, tokenizer, columns)
        if there is None:
            return estimate_dataset_index(
                model,
                head,
                tokenizer,
                dataset,
                options,
                columns=columns,
                skip_bad_rows=skip_bad_rows,
            )
        source = there
    return estimate_index(model, head, source, options)


def _say(job: _Job, written: bool, seconds: float, *, as_json: bool) -> None:
    """Tell what lens was written, or which part of one."""
    from prismlm.index.layout import lens_summary

    if written:
        summary = {"lens": str(job.out), **lens_summary(job.out), "seconds": round(seconds, 1)}
        print_json(summary) if as_json else _print_summary(summary)
    elif is_first_process():
        _report_part(job.out, job.part, as_json=as_json)


def _default_window(path: Path, model: PreTrainedModel) -> int:
    """Return the rows' length that a model was trained on, or what it reads at most."""
    from prismlm.index.training_corpus import trained_length

    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST_DEFAULT_WINDOW
    return trained_length(path) or min(longest, LONGEST_DEFAULT_WINDOW)


def _shard(shard: str | None) -> Shard:
    """Return which part to read: one that is named, one of torchrun's, or all."""
    from prismlm.index.build import Shard

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if shard is None:
        rank = int(os.environ.get("RANK", "0"))
        return Shard(rank, processes, rank == 0) if processes > 1 else Shard()
    if processes > 1:
        raise InputError("--shard and torchrun both choose a part: use one of them.")
    part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        raise InputError(f"--shard {shard}: expected I/N, for example 3/8, the third of eight.")
    return Shard(int(part[1]) - 1, int(part[2]))


def positions_of(share: str) -> float | None:
    """Return the share of positions that was asked for; None for none."""
    if share == "none":
        return None
    from prismlm.index.positions import check_share

    try:
        value = float(share)
    except ValueError:
        raise InputError(
            f"--positions {share} cannot be read: expected a share of the corpus's positions, such "
            "as 1 or 0.1, or none."
        ) from None
    check_share(value)
    return value


def codes_of(name: str) -> CodeName:
    """Return the name of a code, once it is checked."""
    from prismlm.index.codes import check_codes

    check_codes(name)
    if name.startswith("pq"):
        needs("faiss")
    return cast("CodeName", name)


def _out(model: Path, lens: str) -> Path:
    if Path(lens).name.startswith(".") or not Path(lens).name:
        raise InputError(f"--lens {lens} is not a name for a lens: it must not start with a dot.")
    return model / "lens" / lens if Path(lens).name == lens else Path(lens)


def _trained_on(checkpoint: Checkpoint, corpus: Corpus) -> bool | None:
    trained = checkpoint.sidecar.provenance.get("corpus")
    fingerprint = trained.get("fingerprint") if isinstance(trained, dict) else None
    return None if fingerprint is None else fingerprint == corpus.fingerprint


def _report_part(out: Path, part: Shard, *, as_json: bool) -> None:
    from prismlm.index.state import Partial

    done = [number + 1 for number in Partial(out).complete(part.count)]
    left = sorted(set(range(1, part.count + 1)) - set(done))
    if as_json:
        print_json({"lens": None, "shards": part.count, "done": done, "left": left})
        return
    typer.echo(
        f"Part {part.number + 1} of {part.count} is done; left: {', '.join(map(str, left))}. "
        "The last one writes the lens."
    )


def _print_summary(summary: dict[str, Any]) -> None:
    from prismlm.index.mass import LARGEST_GROUPS

    prototypes = summary["prototypes"]
    rows = [
        ("tokens", count(summary["tokens"])),
        ("documents", count(summary["documents"])),
        ("prototypes", f"{prototypes:,}"),
        ("with contexts", f"{summary['with_contexts']:,}"),
        ("in use", f"{summary['in_use']:,} ({summary['in_use'] / max(1, prototypes):.1%})"),
        ("positions kept", count(summary["positions"]) if summary["positions"] else "none"),
        ("time", duration(summary["seconds"])),
    ]
    if summary["summed_share"]:
        share = f"{summary['summed_share']:.1%} of uses"
        rows.insert(2, ("sources summed", f"{share}, as (other): more than {LARGEST_GROUPS:,}"))
    print_rows(rows, last=summary["lens"])
