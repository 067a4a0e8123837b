"""prismlm corpus: turn texts into a corpus directory, and say what one holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import DryRun, Json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from prismlm.corpus import BuildEstimate, Corpus

_ROWS_SHOWN = 20
_BAR_WIDTH = 20

app = typer.Typer(help="Turn texts into a corpus, and look at one.", no_args_is_help=True)


def _column(role: str, otherwise: str) -> Any:
    return typer.Option(
        f"--{role}-column", metavar="NAME", help=f"Column of the {role}; {otherwise}."
    )


@app.command()
def build(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The corpus directory to write.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IN…",
            help="Files or directories: .txt, .jsonl, .ndjson (also .gz, .zst), .parquet. "
            "The word [bold]sample[/bold] is the bundled sample.",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:CONFIG]", help="Stream a Hugging Face dataset, or a local copy of one."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="The split of the dataset to read.")] = "train",
    text_column: Annotated[str, _column("text", "in tables and JSON")] = "text",
    id_column: Annotated[str | None, _column("id", "else file-name:row")] = None,
    source_column: Annotated[str | None, _column("source", "else the file's name")] = None,
    domain_column: Annotated[str | None, _column("domain", "else 'domain' if there")] = None,
    license_column: Annotated[str | None, _column("license", "else 'license' if there")] = None,
    title_column: Annotated[str | None, _column("title", "else 'title' if there")] = None,
    url_column: Annotated[str | None, _column("url", "else 'url' if there")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Use this tokenizer instead of training one."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of a tokenizer that is trained.")] = 8192,
    heldout: Annotated[float, typer.Option(help="Share of documents to hold out.")] = 0.05,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens in one file.")] = 2**27,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DIR if a corpus.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read texts, tokenise them and write a corpus directory."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus import Columns, HubDataset, build_corpus, estimate_build, sample_path

    arguments: dict[str, Any] = {
        "inputs": [sample_path() if name == "sample" else name for name in inputs or []],
        "out": out,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "columns": Columns(
            text=text_column,
            id=id_column,
            source=source_column,
            domain=domain_column,
            license=license_column,
            title=title_column,
            url=url_column,
        ),
        "heldout_fraction": heldout,
        "shard_tokens": shard_tokens,
        "overwrite": overwrite,
    }
    if dataset is not None:
        if inputs or dry_run:
            other = "files" if inputs else "--dry-run, since how much it holds is not known before"
            raise InputError(f"--dataset cannot be combined with {other}.")
        arguments["inputs"] = HubDataset.parse(dataset, split)
    elif not inputs:
        raise InputError("nothing to read: name files or directories, or a --dataset.")
    if dry_run:
        estimate = estimate_build(**arguments)
        _print_json(asdict(estimate)) if as_json else _print_estimate(estimate)
        return
    corpus = build_corpus(**arguments, progress=ConsoleReporter())
    _print_json(_summary(corpus)) if as_json else _print_corpus(corpus)


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A corpus directory.")],
    as_json: Json = False,
) -> None:
    """Say what a corpus holds."""
    from prismlm.corpus import Corpus

    corpus = Corpus.open(directory)
    _print_json(_summary(corpus)) if as_json else _print_corpus(corpus)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _summary(corpus: Corpus) -> dict[str, Any]:
    return {"path": str(corpus.path), "fingerprint": corpus.fingerprint, **corpus.meta}


def _print_estimate(estimate: BuildEstimate) -> None:
    from rich.console import Console
    from rich.table import Table

    from prismlm.cli.format import count, duration, size

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("input", size(estimate.input_bytes)),
        ("text", size(estimate.text_bytes)),
        ("documents", count(estimate.documents)),
        ("tokens", count(estimate.tokens)),
        ("time", duration(estimate.seconds)),
        ("memory", size(estimate.memory_bytes)),
        ("disk", size(estimate.disk_bytes)),
    ):
        table.add_row(name, f"about {value}" if name != "input" else value)
    console = Console(highlight=False)
    console.print(table)
    console.print("[dim]Nothing was written.[/]")


def _print_corpus(corpus: Corpus) -> None:
    from rich.console import Console
    from rich.markup import escape

    from prismlm.cli.format import count

    console = Console(highlight=False)
    counts, heldout = corpus.meta["counts"], corpus.meta["heldout"]
    ratio = counts["characters"] / max(1, counts["tokens"])
    console.print(f"[bold]{escape(str(corpus.path))}[/]", soft_wrap=True)
    console.print(
        f"{count(counts['documents'])} documents · {count(counts['tokens'])} tokens · "
        f"{ratio:.2f} characters per token · vocabulary {corpus.meta['tokenizer']['vocab_size']:,}"
    )
    console.print(
        f"held out: {count(heldout['documents'])} documents, {count(heldout['tokens'])} tokens"
        + (f" · skipped without text: {count(counts['skipped'])}" if counts["skipped"] else "")
    )
    console.print(f"[dim]fingerprint {corpus.fingerprint}[/]")
    for group, key in (("domains", "domain"), ("licenses", "license")):
        rows = sorted(corpus.meta[group], key=lambda row: -row["tokens"])
        console.print()
        console.print(_shares(key, rows[:_ROWS_SHOWN], counts["tokens"]))
        if len(rows) > _ROWS_SHOWN:
            console.print(f"[dim]and {len(rows) - _ROWS_SHOWN} more; all of them with --json[/]")


def _shares(key: str, rows: list[dict[str, Any]], tokens: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from prismlm.cli.format import count

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(key, no_wrap=True, min_width=24)
    for heading in ("documents", "tokens", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        bar = "█" * max(1, round(_BAR_WIDTH * row["tokens"] / rows[0]["tokens"]))
        table.add_row(
            escape(row[key]) if row[key] else "[dim]not given[/]",
            f"{row['documents']:,}",
            count(row["tokens"]),
            f"{row['tokens'] / tokens:.1%}",
            f"[cyan]{bar}[/]",
        )
    return table
