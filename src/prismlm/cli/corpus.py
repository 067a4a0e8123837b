"""prismlm corpus: turn texts into a corpus directory, and summarise one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus import Corpus, HubDataset

DATASET_HELP = "Stream a Hugging Face dataset; json, parquet: the format of --data-files."
DataFiles = Annotated[list[str] | None, option("FILE", "A file of the dataset; repeatable.")]
INPUTS_HELP = (
    "Files or directories: .txt, .md, .json, .jsonl, .ndjson (also .gz, .zst), .csv, .parquet, "
    "or [bold]sample[/bold], the bundled sample."
)
Column = Annotated[str | None, option("NAME", "Its column.")]
VocabSize = Annotated[int | None, option("N", "Vocabulary of the trained tokenizer (8192).")]
Heldout = Annotated[float, option("SHARE", "Held-out share of documents without a split.")]
SplitColumn = Annotated[str | None, option("NAME", "Has train, heldout, test; '' for none.")]
LANGUAGE_HELP = "Leave out texts in other languages, by py3langid."
Quality = Annotated[bool, flag("--quality", "Leave out what fails Gopher's rules on quality.")]
DUPLICATES_HELP = "Of near-duplicates, by datatrove's MinHash, keep the first."
NearDuplicates = Annotated[bool, flag("--remove-near-duplicates", DUPLICATES_HELP)]
app = typer.Typer(help="Turn texts into a corpus, and look at one.", no_args_is_help=True)


@app.command()
def build(
    out: Annotated[Path, option("DIR", "The corpus directory to write.")],
    inputs: Annotated[list[str] | None, argument("IN…", INPUTS_HELP)] = None,
    dataset: Annotated[str | None, option("NAME[:CONFIG]", DATASET_HELP)] = None,
    data_files: DataFiles = None,
    split: Annotated[str, option("NAME", "The split of the dataset to read.")] = "train",
    text_column: Annotated[str, option("NAME", "Column of the text.")] = "text",
    id_column: Annotated[str | None, option("NAME", "Default: file-name:row.")] = None,
    source_column: Annotated[str | None, option("NAME", "Default: the file's name.")] = None,
    domain_column: Column = None,
    license_column: Column = None,
    title_column: Column = None,
    url_column: Column = None,
    split_column: SplitColumn = None,
    tokenizer: Annotated[str | None, option("DIR|NAME", "Use this one; train none.")] = None,
    vocab_size: VocabSize = None,
    heldout: Heldout = 0.05,
    language: Annotated[str | None, option("CODE[,CODE…]", LANGUAGE_HELP)] = None,
    quality: Quality = False,
    remove_near_duplicates: NearDuplicates = False,
    skip_bad_rows: opt.SkipBadRows = False,
    shard: opt.Part = None,
    parts: opt.PartCount = None,
    workers: opt.Workers = None,
    engine: opt.Engine = "local",
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Read texts, tokenise them and write a corpus directory.

    Finished parts are kept: run again to resume.
    """
    from prismlm.corpus import Columns, Corpus, Filters, build_corpus, estimate_build, sample_path
    from prismlm.corpus.part import CorpusPart
    from prismlm.parts import Parts

    opt.check_unused("this is for a tokenizer to train", vocab_size=tokenizer and vocab_size)
    paths = [sample_path() if name == "sample" else name for name in inputs or []]
    stream = _dataset(dataset, split, data_files)
    opt.check_one_of("files or directories, or a --dataset", stream, paths)
    names = (text_column, id_column, source_column, domain_column, license_column, title_column)
    number, count = opt.parse_shard(shard)
    opt.count_parts(parts, workers, engine, shard)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": vocab_size or 8192}
    settings |= {"columns": Columns(*names, url_column, split_column), "overwrite": overwrite}
    filters = Filters(tuple(opt.split_names(language) or ()), quality, remove_near_duplicates)
    settings |= {"heldout_fraction": heldout, "filters": filters, "skip_bad_rows": skip_bad_rows}
    if dry_run:
        return output.show_cost(estimate_build(stream or paths, out, **settings), as_json)
    with orderly_end():
        if shard is None:
            how: dict[str, Any] = {"parts": parts, "workers": workers or 1, "engine": engine}
            build_corpus(stream or paths, out, **settings, **how, progress=output.progress())
        else:
            part = CorpusPart(out, inputs=stream or paths, **settings, progress=output.progress())
            part(None, number, count)
    if Parts(out, count).path.is_dir():  # others are missing
        return output.show_part("corpus", out, number, count, as_json)
    _show_corpus(Corpus.open(out), as_json)


def _dataset(name: str | None, split: str, data_files: list[str] | None) -> HubDataset | None:
    if name is None:
        others = {"data_files": data_files or None, "split": split != "train"}
        opt.check_unused("this chooses what is read of a --dataset", **others)
        return None
    opt.require_packages("datasets")
    from prismlm.corpus import HubDataset

    return HubDataset.parse(name, split, tuple(data_files or ()))


@app.command()
def info(
    directory: Annotated[Path, argument("DIR", "A corpus directory.")],
    as_json: opt.Json = False,
) -> None:
    """Summarise a corpus."""
    from prismlm.corpus import Corpus

    _show_corpus(Corpus.open(directory), as_json)


def _show_corpus(corpus: Corpus, as_json: bool) -> None:
    meta = corpus.meta
    columns = {"domains": "domain", "licenses": "license"}
    groups = {name: _totals(corpus, column) for name, column in columns.items()}
    inputs, counts = meta.get("read") or {}, meta["counts"]
    facts = {
        "corpus": str(corpus.path),
        **counts,
        "characters per token": counts["characters"] / max(1, counts["tokens"]),
        "vocabulary": meta["tokenizer"]["vocab_size"],
        "held out": meta["heldout"],
        "by their own split": meta["split"].get("stated"),
        "left out": meta.get("left_out"),
        "dataset": inputs.get("dataset"),
        "files read": len(inputs.get("files", ())),
        "not read": inputs.get("not_read"),
        "fingerprint": corpus.fingerprint,
    }
    value = {"path": str(corpus.path), "fingerprint": corpus.fingerprint} | meta | groups
    readable = {name: fact for name, fact in facts.items() if fact} | groups
    output.show(value, as_json, *output.tables(readable))


def _totals(corpus: Corpus, column: str) -> list[dict[str, Any]]:
    """Return documents and tokens by the values of a column, those with the most tokens first."""
    import pyarrow as pa

    columns = {name: corpus.documents.column(name) for name in (column, "length")}
    table = pa.table(columns).group_by(column).aggregate([("length", "count"), ("length", "sum")])
    return [
        {
            column: row[column] or "unknown",
            "documents": row["length_count"],
            "tokens": row["length_sum"],
            "share": row["length_sum"] / corpus.num_tokens,
        }
        for row in table.sort_by([("length_sum", "descending"), (column, "ascending")]).to_pylist()
    ]
