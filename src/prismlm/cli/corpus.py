"""prismlm corpus: turn texts into a corpus directory, and say what one holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.corpus import Corpus, HubDataset

Dataset = Annotated[
    str | None,
    option(
        "NAME[:CONFIG]",
        "Stream a Hugging Face dataset, or a local copy of one; json, parquet and the like are "
        "formats of --data-files.",
    ),
]
DataFiles = Annotated[list[str] | None, option("FILE", "Of the dataset; may be repeated.")]
Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IN…",
        help="Files or directories: .txt, .md, .json, .jsonl, .ndjson (also .gz, .zst), .csv, "
        ".parquet, or what Hugging Face's save_to_disk wrote. "
        "The word [bold]sample[/bold] is the bundled sample.",
    ),
]
Column = Annotated[str | None, option("NAME", "Name of the column (default: its role's).")]
Heldout = Annotated[float, option("SHARE", "Share to hold out of documents without a split.")]
SplitColumn = Annotated[str | None, option("NAME", "Has train, heldout, test; '' for none.")]
app = typer.Typer(help="Turn texts into a corpus, and look at one.", no_args_is_help=True)


@app.command()
def build(
    out: Annotated[Path, option("DIR", "The corpus directory to write.")],
    inputs: Inputs = None,
    dataset: Dataset = None,
    dataset_config: Annotated[str | None, option("CONFIG", "Or NAME:CONFIG.")] = None,
    data_files: DataFiles = None,
    split: Annotated[str, option("NAME", "The split of the dataset to read.")] = "train",
    text_column: Annotated[str, option("NAME", "Of the text in tables and JSON.")] = "text",
    id_column: Annotated[str | None, option("NAME", "Default: file-name:row.")] = None,
    source_column: Annotated[str | None, option("NAME", "Default: the file's name.")] = None,
    domain_column: Column = None,
    license_column: Column = None,
    title_column: Column = None,
    url_column: Column = None,
    split_column: SplitColumn = None,
    tokenizer: Annotated[str | None, option("DIR|NAME", "Instead of training one.")] = None,
    vocab_size: Annotated[int, option("N", "Tokens of a tokenizer that is trained.")] = 8192,
    heldout: Heldout = 0.05,
    shard_tokens: Annotated[int, option("N", "Most tokens in one file.")] = 2**27,
    skip_bad_rows: opt.SkipBadRows = False,
    overwrite: Annotated[bool, flag("--overwrite", "Replace DIR if a corpus.")] = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Read texts, tokenise them and write a corpus directory."""
    from prismlm.corpus import Columns, build_corpus, estimate_build, sample_path

    named = (source_column, domain_column, license_column, title_column, url_column, split_column)
    read: Any = [sample_path() if name == "sample" else name for name in inputs or []]
    streamed = dataset_of(dataset, dataset_config, split, data_files)
    if streamed is not None and read:
        raise InputError("--dataset cannot be combined with files.")
    if streamed is None and not read:
        raise InputError("nothing to read: name files or directories, or a --dataset.")
    arguments: dict[str, Any] = {
        "inputs": streamed or read,
        "out": out,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "columns": Columns(text_column, id_column, *named),
        "heldout_fraction": heldout,
        "shard_tokens": shard_tokens,
        "overwrite": overwrite,
        "skip_bad_rows": skip_bad_rows,
    }
    if dry_run:
        output.print_cost(estimate_build(**arguments), as_json=as_json)
    else:
        _show(build_corpus(**arguments, progress=ConsoleReporter()), as_json=as_json)


def dataset_of(
    name: str | None, config: str | None, split: str, data_files: list[str] | None
) -> HubDataset | None:
    """Return the dataset that the options name, or None."""
    if name is None:
        if config is not None or data_files:
            raise InputError("--dataset-config and --data-files are of a --dataset: name it.")
        return None
    opt.require_packages("datasets")
    from prismlm.corpus import HubDataset

    return HubDataset.parse(name, split, config, tuple(data_files or ()))


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A corpus directory.")],
    as_json: opt.Json = False,
) -> None:
    """Say what a corpus holds."""
    from prismlm.corpus import Corpus

    _show(Corpus.open(directory), as_json=as_json)


def _show(corpus: Corpus, *, as_json: bool) -> None:
    meta = corpus.meta
    if as_json:
        output.print_json({"path": str(corpus.path), "fingerprint": corpus.fingerprint, **meta})
        return
    read, tokens = meta.get("read") or {}, max(1, meta["counts"]["tokens"])
    facts = {
        "corpus": str(corpus.path),
        **meta["counts"],
        "characters per token": meta["counts"]["characters"] / tokens,
        "vocabulary": meta["tokenizer"]["vocab_size"],
        "held out": meta["heldout"],
        "by their own split": meta["split"].get("stated"),
        "left out": meta.get("left_out"),
        "files read": len(read.get("files", ())),
        "named again and read once": read.get("named_again"),
        "not read": read.get("not_read"),
        "fingerprint": corpus.fingerprint,
    }
    groups = {
        name: [
            {**row, key: row[key] or "unknown", "share": row["tokens"] / tokens}
            for row in sorted(meta[name], key=lambda row: -row["tokens"])
        ]
        for name, key in {"domains": "domain", "licenses": "license"}.items()
    }
    output.print_value({name: one for name, one in facts.items() if one} | groups)
