"""prismlm index: read a corpus once and keep what each prototype stands for in it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prismlm.cli.options import DryRun, Json, Model, is_first_process
from prismlm.errors import InputError, suggest

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.lens.index import IndexOptions, Shard
    from prismlm.lens.index_estimate import IndexEstimate
    from prismlm.lens.language_model import Checkpoint

SPLITS = ["train", "heldout", "all"]
LONGEST_DEFAULT_WINDOW = 1024


def index(
    model: Model,
    corpus: Annotated[Path, typer.Option(metavar="DIR", help="The corpus to read.")],
    lens: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="Write MODEL/lens/NAME; else the corpus's name."),
    ] = None,
    contexts: Annotated[int, typer.Option(metavar="L", help="Places kept per prototype.")] = 64,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens read at once; else as in training.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens between windows; else 3/4 of one.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="SPLIT", help="Documents to read: train, heldout or all.")
    ] = "train",
    text: Annotated[
        bool, typer.Option("--text/--no-text", help="Keep the text around each place, or offsets.")
    ] = True,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Read one of N parts; the last one writes the lens."),
    ] = None,
    tokens_per_batch: Annotated[
        int,
        typer.Option(metavar="N", help="Tokens ranked together; changes memory, not the result."),
    ] = 2**18,
    save_every: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often what was found is saved.")
    ] = 60.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a lens, or one that was begun otherwise.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Find the text each prototype stands for, so that explain can point to it.

    An index that was interrupted or killed goes on where it was with the same command. Under
    torchrun every process reads one part.
    """
    _check(split, contexts)
    if save_every < 0:
        raise InputError(f"--save-every is {save_every:g}: expected at least 0.")
    part = _shard(shard)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus.store import Corpus
    from prismlm.lens.index import IndexOptions, check_lens, index_shard
    from prismlm.lens.language_model import load_checkpoint, tokenizer_fingerprint
    from prismlm.progress import SILENT

    source = Corpus.open(corpus)
    out = _out(model, lens or source.name)
    check_lens(out, overwrite=overwrite)
    checkpoint = load_checkpoint(model)
    width = _window(checkpoint) if window is None else window
    options = IndexOptions(
        contexts=contexts,
        window=width,
        stride=max(1, width * 3 // 4) if stride is None else stride,
        split=cast("Split", split),
        with_text=text,
        tokens_per_batch=tokens_per_batch,
    )
    if dry_run:
        _estimate(checkpoint, source, options, as_json=as_json)
        return
    began = time.monotonic()
    written = index_shard(
        checkpoint.model,
        checkpoint.sidecar.head,
        source,
        out,
        options,
        part,
        trained_on=_trained_on(checkpoint, source),
        tokenizer=tokenizer_fingerprint(checkpoint.tokenizer),
        overwrite=overwrite,
        save_seconds=save_every,
        progress=ConsoleReporter() if is_first_process() else SILENT,
    )
    if written is not None:
        _report(out, time.monotonic() - began, as_json=as_json)
    elif is_first_process():
        _report_part(out, part, as_json=as_json)


def _shard(shard: str | None) -> Shard:
    """Return which part to read: one that is named, one of torchrun's, or all."""
    from prismlm.lens.index import Shard

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if shard is None:
        rank = int(os.environ.get("RANK", "0"))
        return Shard(rank, processes, rank == 0) if processes > 1 else Shard()
    number, _, count = shard.partition("/")
    if processes > 1:
        raise InputError("--shard and torchrun both choose a part: use one of them.")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"--shard {shard}: expected I/N, for example 3/8, the third of eight.")
    return Shard(int(number) - 1, int(count))


def _check(split: str, contexts: int) -> None:
    if split not in SPLITS:
        raise InputError(
            f"there is no split {split!r}: expected {', '.join(SPLITS)}.{suggest(split, SPLITS)}"
        )
    if contexts < 1:
        raise InputError(f"--contexts is {contexts}: expected at least 1.")


def _out(model: Path, lens: str) -> Path:
    if Path(lens).name.startswith(".") or not Path(lens).name:
        raise InputError(f"--lens {lens} is not a name for a lens: it must not start with a dot.")
    return model / "lens" / lens if Path(lens).name == lens else Path(lens)


def _window(checkpoint: Checkpoint) -> int:
    recipe = checkpoint.sidecar.provenance.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    trained = data.get("length") if isinstance(data, dict) else None
    longest = getattr(checkpoint.model.config, "max_position_embeddings", None)
    if isinstance(trained, int) and trained > 0:
        return trained
    return min(longest or LONGEST_DEFAULT_WINDOW, LONGEST_DEFAULT_WINDOW)


def _trained_on(checkpoint: Checkpoint, corpus: Corpus) -> bool | None:
    trained = checkpoint.sidecar.provenance.get("corpus")
    fingerprint = trained.get("fingerprint") if isinstance(trained, dict) else None
    return None if fingerprint is None else fingerprint == corpus.fingerprint


def _estimate(
    checkpoint: Checkpoint, corpus: Corpus, options: IndexOptions, *, as_json: bool
) -> None:
    from prismlm.lens.index_estimate import estimate_index

    estimate = estimate_index(checkpoint.model, checkpoint.sidecar.head, corpus, options)
    _print_json(asdict(estimate)) if as_json else _print_estimate(estimate)


def _report(out: Path, seconds: float, *, as_json: bool) -> None:
    from prismlm.lens.layout import lens_summary

    summary = {"lens": str(out), **lens_summary(out), "seconds": round(seconds, 1)}
    _print_json(summary) if as_json else _print_summary(summary)


def _report_part(out: Path, part: Shard, *, as_json: bool) -> None:
    from prismlm.lens.index_state import Partial

    done = [number + 1 for number in Partial(out).complete(part.count)]
    left = sorted(set(range(1, part.count + 1)) - set(done))
    if as_json:
        _print_json({"lens": None, "shards": part.count, "done": done, "left": left})
        return
    typer.echo(
        f"Part {part.number + 1} of {part.count} is done; left: {', '.join(map(str, left))}. "
        "The last one writes the lens."
    )


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def _print_estimate(estimate: IndexEstimate) -> None:
    from prismlm.cli.format import count, duration, size

    _print_rows(
        [
            ("documents", count(estimate.documents)),
            ("tokens", count(estimate.tokens)),
            ("speed", f"{count(estimate.tokens_per_second)} tokens/s"),
            ("time", f"about {duration(estimate.seconds)}"),
            ("memory", f"about {size(estimate.memory_bytes)}"),
            ("disk", f"about {size(estimate.disk_bytes)}"),
        ],
        last="Nothing was written.",
    )


def _print_summary(summary: dict[str, Any]) -> None:
    from prismlm.cli.format import count, duration

    prototypes = summary["prototypes"]
    _print_rows(
        [
            ("tokens", count(summary["tokens"])),
            ("documents", count(summary["documents"])),
            ("prototypes", f"{prototypes:,}"),
            ("with contexts", f"{summary['with_contexts']:,}"),
            ("in use", f"{summary['in_use']:,} ({summary['in_use'] / max(1, prototypes):.1%})"),
            ("time", duration(summary["seconds"])),
        ],
        last=summary["lens"],
    )


def _print_rows(rows: list[tuple[str, str]], last: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(last, style="dim"), soft_wrap=True)
