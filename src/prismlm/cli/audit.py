"""prismlm audit: what a model's predictions over many texts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option
from prismlm.cli.progress import ConsoleReporter
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Texts: {opt.TEXT_KINDS}.")]
LeastShare = Annotated[
    float, option("S", "A row names every document with at least this share.", least=0, most=1)
]
Output = Annotated[Path | None, option("FILE", "Write one row per text.")]


def audit(
    model: opt.Model,
    files: Files,
    lens: opt.Lens = None,
    corpus: opt.MovedCorpus = None,
    where: opt.Where = None,
    by: opt.By = None,
    method: opt.Method = "evidence",
    documents: Annotated[int, option("N", "Documents shown.", least=0)] = 10,
    least_share: LeastShare = 0.01,
    window: opt.Window = None,
    stride: opt.Stride = None,
    text_column: Annotated[str, option("NAME", "Of the texts.")] = "text",
    id_column: Annotated[str | None, option("NAME", "Of their ids (default: file, row).")] = None,
    skip_bad_rows: opt.SkipBadRows = False,
    parquet: Output = None,
    jsonl: Output = None,
    csv: Annotated[Path | None, option("FILE", "The largest shares, for a spreadsheet.")] = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a model's predictions over many texts rely on, and write reports."""
    from prismlm.corpus.documents import Columns
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit, estimate_audit
    from prismlm.explain.language_model import load
    from prismlm.explain.texts import text_options
    from prismlm.lens.where import parse_where

    written = {"parquet": parquet, "jsonl": jsonl, "csv": csv, "html": html}
    opt.check_results(model, lens, *files, overwrite=overwrite, **written)
    conditions = parse_where(where or [])
    columns = Columns(text=text_column, id=id_column)
    how: dict[str, Any] = {"skip_bad_rows": skip_bad_rows, "answered_chats": "last"}
    reader = DocumentReader(list(files), columns, **how)
    lm = load(model, lens=lens, corpus=corpus)
    reader.tokenizer = lm.tokenizer
    audited = Audit(lm, text_options([lm], window, stride, method), conditions, least_share)
    with orderly_end():
        if dry_run:
            output.print_cost(estimate_audit(audited, reader), as_json=as_json)
            return
        rows = [path for path in (parquet, jsonl, csv) if path is not None]
        summary = _run(audited, reader, rows, html)
    output.wrote(*rows, html)
    if as_json:
        output.print_json(summary)
    else:
        _print(audited, summary, by or audited.lens.telling, documents)


def _run(
    audit: Audit, reader: DocumentReader, paths: list[Path], html: Path | None
) -> dict[str, Any]:
    from prismlm.explain.audit import audit_files
    from prismlm.pages.audit import audit_page

    for _ in reader:
        # A row that cannot be used is named now, and not after what the model makes of those above.
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


def _print(audit: Audit, summary: dict[str, Any], by: str, documents: int) -> None:
    from prismlm.cli.trace import print_documents, print_shares
    from prismlm.corpus.read import counted
    from prismlm.explain.support import levels_in_words
    from prismlm.pages.trace import CAVEAT

    ce, explained = summary["ce"], summary["explained_share"]
    facts = [f"{summary['texts']:,} texts", f"{summary['predictions']:,} predictions"]
    facts += [] if ce is None else [f"cross-entropy {ce:.3f}"]
    facts += [] if explained is None else [f"explained share {explained:.2f}"]
    facts += [f"left out: {counted(summary['left_out'])}"] if summary["left_out"] else []
    output.say(" · ".join(facts))
    output.say(*summary["notes"], style="bold")
    if summary["support"] is not None:
        output.say(f"Support: {levels_in_words(summary['support']['levels'])}")
    output.say("")
    whole, where = audit.attribution(), dict(audit.where)
    print_shares(whole.sources(by, where))
    if documents:
        print_documents(output.console_for_reading(), whole.documents(documents, where))
    output.say(CAVEAT, style="dim")
