"""prismlm corpus: turn texts into a corpus directory, and say what one holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.options import DryRun, Json, SkipBadRows, flag, needs, option
from prismlm.cli.output import console_for_reading, plain, print_cost, print_json, table_of
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.corpus import Corpus, HubDataset

_ROWS_SHOWN = 20
_BAR_WIDTH = 20


def _column(role: str, otherwise: str) -> Any:
    return option("NAME", f"Column of the {role} ({otherwise}).", f"--{role}-column")


Dataset = Annotated[
    str | None,
    option(
        "NAME[:CONFIG]",
        "Stream a Hugging Face dataset, or a local copy of one; json, parquet and the like "
        "are formats of --data-files.",
    ),
]
DatasetConfig = Annotated[
    str | None, option("CONFIG", "The dataset's configuration, or NAME:CONFIG.")
]
DataFiles = Annotated[
    list[str] | None, option("FILE", "Only these files of the dataset; may be repeated.")
]
TextColumn = Annotated[str, _column("text", "in tables and JSON")]
IdColumn = Annotated[str | None, _column("id", "default: file-name:row")]
SourceColumn = Annotated[str | None, _column("source", "default: the file's name")]
DomainColumn = Annotated[str | None, _column("domain", "default: 'domain'")]
LicenseColumn = Annotated[str | None, _column("license", "default: 'license'")]
TitleColumn = Annotated[str | None, _column("title", "default: 'title'")]
UrlColumn = Annotated[str | None, _column("url", "default: 'url'")]
SplitColumn = Annotated[
    str | None,
    option(
        "NAME",
        "Column with train, heldout, validation or test (default: 'split'); '' for none.",
        "--split-column",
    ),
]

app = typer.Typer(help="Turn texts into a corpus, and look at one.", no_args_is_help=True)


Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IN…",
        help="Files or directories: .txt, .md, .json, .jsonl, .ndjson (also .gz, .zst), .csv, "
        ".parquet, or what Hugging Face's save_to_disk wrote. "
        "The word [bold]sample[/bold] is the bundled sample.",
    ),
]
OwnTokenizer = Annotated[
    str | None, option("DIR|NAME", "Use this tokenizer instead of training one.")
]


@app.command()
def build(
    out: Annotated[Path, option("DIR", "The corpus directory to write.")],
    inputs: Inputs = None,
    dataset: Dataset = None,
    dataset_config: DatasetConfig = None,
    data_files: DataFiles = None,
    split: Annotated[str, typer.Option(help="The split of the dataset to read.")] = "train",
    text_column: TextColumn = "text",
    id_column: IdColumn = None,
    source_column: SourceColumn = None,
    domain_column: DomainColumn = None,
    license_column: LicenseColumn = None,
    title_column: TitleColumn = None,
    url_column: UrlColumn = None,
    split_column: SplitColumn = None,
    tokenizer: OwnTokenizer = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of a tokenizer that is trained.")] = 8192,
    heldout: Annotated[
        float, typer.Option(help="Share to hold out of documents without a split.")
    ] = 0.05,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens in one file.")] = 2**27,
    skip_bad_rows: SkipBadRows = False,
    overwrite: Annotated[bool, flag("--overwrite", "Replace DIR if a corpus.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read texts, tokenise them and write a corpus directory."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus import Columns, build_corpus, estimate_build, sample_path

    named = (source_column, domain_column, license_column, title_column, url_column, split_column)
    columns = Columns(text_column, id_column, *named)
    arguments: dict[str, Any] = {
        "inputs": [sample_path() if name == "sample" else name for name in inputs or []],
        "out": out,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "columns": columns,
        "heldout_fraction": heldout,
        "shard_tokens": shard_tokens,
        "overwrite": overwrite,
        "skip_bad_rows": skip_bad_rows,
    }
    found = dataset_of(dataset, dataset_config, split, data_files)
    if found is not None:
        if inputs:
            raise InputError("--dataset cannot be combined with files.")
        arguments["inputs"] = found
    elif not inputs:
        raise InputError("nothing to read: name files or directories, or a --dataset.")
    if dry_run:
        print_cost(estimate_build(**arguments), as_json=as_json)
        return
    corpus = build_corpus(**arguments, progress=ConsoleReporter())
    print_json(_summary(corpus)) if as_json else _print_corpus(corpus)


def dataset_of(
    name: str | None, config: str | None, split: str, data_files: list[str] | None
) -> HubDataset | None:
    """Return the dataset that the options name, or None.

    Raises:
        InputError: options of a dataset without one.
    """
    if name is None:
        if config is not None or data_files:
            raise InputError("--dataset-config and --data-files are of a --dataset: name it.")
        return None
    needs("datasets")
    from prismlm.corpus import HubDataset

    return HubDataset.parse(name, split, config, tuple(data_files or ()))


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A corpus directory.")],
    as_json: Json = False,
) -> None:
    """Say what a corpus holds."""
    from prismlm.corpus import Corpus

    corpus = Corpus.open(directory)
    print_json(_summary(corpus)) if as_json else _print_corpus(corpus)


def _summary(corpus: Corpus) -> dict[str, Any]:
    return {"path": str(corpus.path), "fingerprint": corpus.fingerprint, **corpus.meta}


def _print_corpus(corpus: Corpus) -> None:
    from prismlm.corpus.read import counted, in_words

    console = console_for_reading()
    counts, heldout = corpus.meta["counts"], corpus.meta["heldout"]
    ratio = counts["characters"] / max(1, counts["tokens"])
    console.print(str(corpus.path), style="bold", soft_wrap=True)
    console.print(
        f"{count(counts['documents'])} documents · {count(counts['tokens'])} tokens · "
        f"{ratio:.2f} characters per token · vocabulary {corpus.meta['tokenizer']['vocab_size']:,}"
    )
    console.print(
        f"held out: {count(heldout['documents'])} documents, {count(heldout['tokens'])} tokens"
        + (f" · left out: {counted(corpus.meta.get('left_out', {}))}" if counts["skipped"] else "")
    )
    stated = corpus.meta["split"].get("stated")
    if stated:
        console.print(
            f"by their own split: {count(stated['train'])} documents for training, "
            f"{count(stated['heldout'])} held out"
            + ("" if heldout["documents"] else "; --split-column '' lets ids decide")
        )
    read = corpus.meta.get("read")
    if read is not None:
        again, others = read["named_again"], in_words(read["not_read"])
        console.print(
            f"read: {len(read['files']):,} file{'s' * (len(read['files']) != 1)}"
            + (f" · named again and read once: {again:,}" if again else "")
        )
        if others:
            console.print(Text.assemble(("not read: ", "bold"), others))
    console.print(f"fingerprint {corpus.fingerprint}", style="dim")
    for group, key in (("domains", "domain"), ("licenses", "license")):
        rows = sorted(corpus.meta[group], key=lambda row: -row["tokens"])
        console.print()
        console.print(_shares(key, rows[:_ROWS_SHOWN], counts["tokens"]))
        if len(rows) > _ROWS_SHOWN:
            more = f"and {len(rows) - _ROWS_SHOWN} more; all of them with --json"
            console.print(more, style="dim")


def _shares(key: str, rows: list[dict[str, Any]], tokens: int) -> Table:
    from prismlm.index.where import UNKNOWN

    table = table_of(key, "*documents", "*tokens", "*share", "")
    table.columns[0].min_width = 24
    for row in rows:
        bar = "█" * max(1, round(_BAR_WIDTH * row["tokens"] / rows[0]["tokens"]))
        table.add_row(
            plain(row[key]) if row[key] else Text(UNKNOWN, "dim"),
            f"{row['documents']:,}",
            count(row["tokens"]),
            f"{row['tokens'] / tokens:.1%}",
            Text(bar, "cyan"),
        )
    return table
