"""prismlm audit, sources and compare: what the predictions over many texts rely on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit

NAME_WIDTH = 28
Files = Annotated[list[Path], argument("FILE...", f"Texts: {opt.TEXT_KINDS}.")]
LeastShare = Annotated[float, option("S", "Least share of a document in a row.", min=0, max=1)]
Output = Annotated[Path | None, option("FILE", "Write one row per text.")]
SharesBy = Annotated[Literal["source", "domain", "license"], option(None, "Group shares by this.")]


def _read_documents(files: list[Path], tokenizer: Any = None, **options: Any) -> DocumentReader:
    from prismlm.corpus.read import DocumentReader

    return DocumentReader(list(files), tokenizer=tokenizer, answered_chats="last", **options)


def audit(
    model: opt.Model,
    files: Files,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    where: opt.Where = None,
    by: opt.By = None,
    method: opt.Method = "evidence",
    documents: Annotated[int, option("N", "Maximum number of documents.", min=0)] = 10,
    least_share: LeastShare = 0.01,
    window: opt.Window = None,
    stride: opt.Stride = None,
    text_column: Annotated[str, option("NAME", "Column of the texts.")] = "text",
    id_column: Annotated[
        str | None, option("NAME", "Column of the ids (default: file, row).")
    ] = None,
    skip_bad_rows: opt.SkipBadRows = False,
    parquet: Output = None,
    jsonl: Output = None,
    csv: Annotated[Path | None, option("FILE", "Write the largest shares as a table.")] = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a model's predictions over many texts rely on, and write reports."""
    from prismlm.corpus.documents import Columns
    from prismlm.explain.audit import Audit, estimate_audit
    from prismlm.explain.language_model import load
    from prismlm.explain.texts import text_options
    from prismlm.lens.cells import parse_where

    outputs = {"parquet": parquet, "jsonl": jsonl, "csv": csv, "html": html}
    opt.check_output_files(model, lens, *files, overwrite=overwrite, **outputs)
    conditions = parse_where(where or [])
    columns = Columns(text=text_column, id=id_column)
    reader = _read_documents(files, columns=columns, skip_bad_rows=skip_bad_rows)
    lm = load(model, lens=lens, corpus=corpus)
    reader.tokenizer = lm.tokenizer
    report = Audit(lm, text_options([lm], window, stride, method), conditions, least_share)
    with orderly_end():
        if dry_run:
            output.print_cost(estimate_audit(report, reader), as_json=as_json)
            return
        rows = [path for path in (parquet, jsonl, csv) if path is not None]
        summary = _run_audit(report, reader, rows, html)
    output.report_written(*rows, html)
    if as_json:
        output.print_json(summary)
    else:
        _print_audit(report, summary, by or report.lens.default_group_by, documents)


def _run_audit(
    audit: Audit, reader: DocumentReader, paths: list[Path], html: Path | None
) -> dict[str, Any]:
    from prismlm.explain.audit import audit_files
    from prismlm.pages.audit import audit_page

    for _ in reader:
        # Report a bad row before the model reads those above it.
        pass
    pages = [] if html is None else [html]
    reporter = ConsoleReporter()
    with (
        audit_files(paths, pages, audit.identity) as (add, temporary),
        reporter.task("Reading texts", reader.total, reader.unit) as task,
    ):
        done = 0
        for row in audit.read(reader):
            add(row)
            task.advance(reader.done - done)
            done = reader.done
        summary = audit.to_dict() | {"left_out": dict(reader.left_out)}
        for path in temporary:
            path.write_text(audit_page(summary), encoding="utf-8")
    return summary


def _print_audit(audit: Audit, summary: dict[str, Any], by: str, documents: int) -> None:
    from prismlm.cli.trace import print_documents, print_shares
    from prismlm.corpus.read import count_list
    from prismlm.pages.trace import CAVEAT

    ce, explained = summary["ce"], summary["explained_share"]
    figures = [f"{summary['texts']:,} texts", f"{summary['predictions']:,} predictions"]
    figures += [] if ce is None else [f"cross-entropy {ce:.3f}"]
    figures += [] if explained is None else [f"explained share {explained:.2f}"]
    figures += [f"left out: {count_list(summary['left_out'])}"] if summary["left_out"] else []
    output.say(" · ".join(figures))
    output.say(*summary["notes"], style="bold")
    if summary["support"] is not None:
        levels = summary["support"]["levels"].items()
        output.say(f"Support: {', '.join(f'{count:,} {level}' for level, count in levels)}")
    output.say("")
    attribution, where = audit.attribution(), dict(audit.where)
    print_shares(attribution.sources(by, where))
    if documents:
        print_documents(attribution.documents(documents, where))
    output.say(CAVEAT, style="dim")


def sources(
    model: opt.Model,
    doc: Annotated[str, option("ID", "The document's id.", "--doc")],
    file: opt.TextFiles = None,
    audit: Annotated[Path | None, option("PARQUET", "Or the rows of an audit.")] = None,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    top: Annotated[int, option("N", "Maximum number of prototypes and texts.", min=1)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    if file and audit is not None:
        raise InputError("expected texts (--file) or an audit (--audit), got both.")
    from prismlm.explain.language_model import load
    from prismlm.explain.sources import audited_texts_that_rely, document_sources, texts_that_rely
    from prismlm.explain.texts import text_options

    lm = load(model, lens=lens, corpus=corpus)
    opened = lm.lens_for("document to find")
    document, texts, left_out = document_sources(opened, doc), None, dict[str, int]()
    if audit is not None:
        texts = audited_texts_that_rely(opened, doc, audit)
    elif file:
        reader = _read_documents(file, lm.tokenizer)
        texts = texts_that_rely(lm, doc, reader, text_options([lm]))
        left_out = dict(reader.left_out)
    value: dict[str, Any] = {"model": str(model), "lens": str(opened.path), **asdict(document)}
    value["texts"] = None
    if texts is not None:
        value["texts"] = [text._asdict() for text in texts.texts]
        value |= {"texts_read": texts.read, "share": texts.share, "left_out": left_out}
        value |= {} if texts.least is None else {"least_share": texts.least}
    if as_json:
        output.print_json(value)
    else:
        output.say(document.sentence(texts) + "\n", style="bold")
        output.print_value(value, top)


def compare(
    model_a: Annotated[Path, argument("MODEL_A", "A model or a checkpoint.")],
    model_b: Annotated[Path, argument("MODEL_B", "Another, same tokenizer.")],
    file: opt.TextFiles = None,
    lens_a: Annotated[str | None, option("NAME|DIR", "A's lens.")] = None,
    lens_b: Annotated[str | None, option("NAME|DIR", "B's lens.")] = None,
    by: SharesBy = "domain",
    window: opt.Window = None,
    stride: opt.Stride = None,
    parquet: Annotated[Path | None, option("FILE", "Write every pair of prototypes.")] = None,
    overwrite: opt.Overwrite = False,
    top: Annotated[int, option("N", "Maximum number of pairs and shares.", min=0)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Compare two models: losses and sources on the same texts, and which prototypes correspond."""
    from prismlm.explain.compare import check_comparable, compare_prototypes, compare_texts
    from prismlm.explain.language_model import load
    from prismlm.explain.rows import write_rows
    from prismlm.explain.texts import text_options

    inputs = (model_a, model_b, lens_a, lens_b, *(file or ()))
    opt.check_output_files(*inputs, overwrite=overwrite, parquet=parquet)
    a, b = load(model_a, lens=lens_a), load(model_b, lens=lens_b)
    check_comparable(a, b)
    texts = None
    if file:
        reader = _read_documents(file, a.tokenizer)
        texts = compare_texts(a, b, reader, text_options([a, b], window, stride))
        texts |= {"left_out": dict(reader.left_out)}
    prototypes = compare_prototypes(a, b)
    if parquet is not None:
        write_rows(prototypes["pairs"], parquet)
        output.report_written(parquet)
    del prototypes["pairs"][top:]
    value: dict[str, Any] = {
        name: {"model": str(path), "lens": None if lm.lens is None else str(lm.lens.path)}
        for name, path, lm in (("a", model_a, a), ("b", model_b, b))
    }
    value |= {"texts": texts, "prototypes": prototypes}
    output.print_json(value) if as_json else _print_comparison(value, by, top)


def _print_comparison(value: dict[str, Any], by: str, top: int) -> None:
    """Print the JSON document, with the ``top`` largest shares by one column."""
    output.say(f"A  {value['a']['model']}", f"B  {value['b']['model']}\n", style="bold")
    if value["texts"] is not None:
        shares = value["texts"].pop("shares")
        output.print_facts(value["texts"])
        output.say("")
        if shares is not None:
            rest = shares[by]["unattributed"]
            last = {"key": "unattributed", **rest, "difference": rest["b"] - rest["a"]}
            columns = {"key": "", "a": ".1%", "b": ".1%", "difference": "+.1%"}
            output.print_rows(f"Shares by {by}", columns, [*shares[by]["items"][:top], last])
    pairs = value["prototypes"].pop("pairs")
    output.print_facts(value["prototypes"])
    output.say("")
    columns = {"a": "", "b": "", "cosine": ".3f", "mutual": "", "in_common": ".0%"}
    columns |= {"a_name": "", "b_name": ""}
    output.print_rows("Pairs", columns, list(map(_pair_cells, pairs)))


def _pair_cells(pair: dict[str, Any]) -> dict[str, Any]:
    # The Jaccard similarity belongs to A's best match by contexts, maybe another prototype than b.
    jaccard = pair["jaccard"] if pair["b_by_contexts"] == pair["b"] else None
    cells = {"mutual": "yes" if pair["mutual"] else "no", "in_common": jaccard}
    for key in ("a_name", "b_name"):
        cells[key] = output.shorten(pair[key], NAME_WIDTH) if pair[key] else None
    return pair | cells
