"""prismlm audit, sources and compare: what the predictions over many texts rely on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, option
from prismlm.errors import InputError
from prismlm.probes.results import Row
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit
    from prismlm.explain.language_model import PrismLM

IdColumn = Annotated[str | None, option("NAME", "Column of the ids (default: file, row).")]
Output = Annotated[Path | None, option("FILE", "Write one row per text.")]
SharesBy = Annotated[Literal["source", "domain", "license"], option(None, "Group shares by this.")]


def _read_documents(files: list[Path], lm: PrismLM) -> DocumentReader:
    from prismlm.corpus.read import DocumentReader

    return DocumentReader(files, answered_chats="last", tokenizer=lm.tokenizer)


def audit(
    model: opt.Model,
    files: Annotated[list[Path], argument("FILE...", f"Texts: {opt.TEXT_KINDS}.")],
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    device: opt.Device = "cpu",
    where: opt.Where = None,
    by: opt.By = None,
    documents: Annotated[int, option("N", "Maximum number of documents.", min=0)] = 10,
    window: opt.Window = None,
    text_column: Annotated[str, option("NAME", "Column of the texts.")] = "text",
    id_column: IdColumn = None,
    skip_bad_rows: opt.SkipBadRows = False,
    parquet: Output = None,
    jsonl: Output = None,
    csv: Annotated[Path | None, option("FILE", "Write the largest shares as a table.")] = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    parts: opt.PartCount = None,
    workers: opt.Workers = None,
    engine: opt.Engine = "local",
    as_json: opt.Json = False,
) -> None:
    """Show what a model's predictions over many texts rely on, and write reports.

    With --parts, finished parts are kept: run again to resume.
    """
    tables = {"parquet": parquet, "jsonl": jsonl, "csv": csv}
    opt.check_output_files(model, lens, *files, overwrite=overwrite, html=html, **tables)
    from prismlm.corpus.documents import Columns
    from prismlm.explain.audit import write_audit
    from prismlm.explain.parts import AuditJob, audit_in_parts
    from prismlm.lens.cells import parse_where
    from prismlm.outputs import write_text
    from prismlm.pages.audit import audit_page

    paths, count = list(filter(None, tables.values())), opt.count_parts(parts, workers, engine)
    if count and not paths:
        raise InputError("finished parts are kept beside a file: add --parquet FILE.")
    columns, conditions = Columns(text=text_column, id=id_column), parse_where(where or [])
    fixed = {"out": paths[0] if paths else Path(), "files": tuple(files)}
    one: AuditJob = opt.fill(AuditJob, locals(), columns=columns, where=conditions, **fixed)
    reader = one.reader()
    with orderly_end():
        if count:
            how: dict[str, Any] = {"engine": engine, "workers": workers or 1}
            how |= {"overwrite": overwrite, "progress": output.progress()}
            report, left_out = audit_in_parts(one, count, paths, **how)
        else:
            report = one.empty()
            reader.tokenizer = report.lm.tokenizer
            write_audit(_rows(report, reader), paths)
            left_out = dict(reader.left_out)
        summary = report.to_dict() | {"left_out": left_out}
        if html is not None:
            write_text(html, audit_page(summary))
    output.report_written(*paths, html)
    column = by or report.lens.default_group_by
    output.show(summary, as_json, _audit_parts(report, summary, column, documents))


def _rows(audit: Audit, reader: DocumentReader) -> Iterator[Row]:
    """Yield a row for each document as it is read."""
    done = 0
    for _ in reader:
        # Report a bad row before the model reads those above it.
        pass
    with output.progress().task("Reading texts", reader.total, reader.unit) as task:
        for row in audit.read(reader):
            yield row
            task.advance(reader.done - done)
            done = reader.done


def _audit_parts(audit: Audit, summary: Row, by: str, documents: int) -> Iterator[Any]:
    from prismlm.cli.trace import documents_of, shares_of
    from prismlm.pages.trace import CAVEAT

    names = ("texts", "predictions", "ce", "explained_share", "left_out")
    yield output.facts_line({name: summary[name] for name in names if summary[name]})
    yield from map(output.heading, summary["notes"])
    if summary["support"] is not None:
        levels = summary["support"]["levels"].items()
        yield f"Support: {', '.join(f'{count:,} {level}' for level, count in levels)}"
    attribution, where = audit.attribution(), dict(audit.where)
    yield from ("", shares_of(attribution.sources(by, where)))
    if documents:
        yield from documents_of(attribution.documents(documents, where))
    yield output.dim(CAVEAT)


def sources(
    model: opt.Model,
    doc: Annotated[str, option("ID", "The document's id.", "--doc")],
    file: opt.TextFiles = None,
    lens_name: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    top: Annotated[int, option("N", "Maximum number of prototypes and texts.", min=1)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    from prismlm.explain.audit import document_sources, texts_that_rely

    lm = opt.open_model(model, lens_name, corpus)
    lens = lm.lens_for("document to find")
    document, texts = document_sources(lens, doc), None
    value = {"model": str(model), "lens": lens.address, **asdict(document), "texts": None}
    if file:
        reader = _read_documents(file, lm)
        texts = texts_that_rely(lm, doc, reader)
        value |= texts | {"left_out": dict(reader.left_out)}
    sentence = output.heading(document.sentence(texts) + "\n")
    output.show(value, as_json, sentence, *output.tables(value, top))


def compare(
    model_a: Annotated[Path, argument("MODEL_A", "A model or a checkpoint.")],
    model_b: Annotated[Path, argument("MODEL_B", "Another, same tokenizer.")],
    file: opt.TextFiles = None,
    lens_a: Annotated[str | None, option("NAME|DIR", "A's lens.")] = None,
    lens_b: Annotated[str | None, option("NAME|DIR", "B's lens.")] = None,
    by: SharesBy = "domain",
    top: Annotated[int, option("N", "Maximum number of pairs and shares.", min=0)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Compare two models: losses and sources on the same texts, and which prototypes correspond."""
    from prismlm.explain.compare import compare_prototypes, compare_texts

    a, b = opt.open_model(model_a, lens_a), opt.open_model(model_b, lens_b)
    texts = None
    if file:
        reader = _read_documents(file, a)
        texts = compare_texts(a, b, reader) | {"left_out": dict(reader.left_out)}
    prototypes = compare_prototypes(a, b)
    del prototypes["pairs"][top:]
    value: Row = {
        name: {"model": str(path), "lens": lm.lens and lm.lens.address}
        for name, path, lm in (("a", model_a, a), ("b", model_b, b))
    }
    value |= {"texts": texts, "prototypes": prototypes}
    output.show(value, as_json, _comparison(value, by, top))


def _comparison(value: Row, by: str, top: int) -> Iterator[Any]:
    yield output.heading(f"A  {value['a']['model']}\nB  {value['b']['model']}\n")
    if texts := value["texts"]:
        yield {name: figure for name, figure in texts.items() if name != "shares"}
        yield ""
        if shares := texts["shares"]:
            rest = shares[by]["unattributed"]
            last = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
            rows = [*shares[by]["items"][:top], last]
            yield output.table(f"Shares by {by}", "key a:.1% b:.1% difference:+.1%", rows)
    yield from output.tables(value["prototypes"], top)
