"""prismlm audit: what a model's predictions over many texts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import (
    TEXT_KINDS,
    By,
    DryRun,
    Json,
    Lens,
    Method,
    Model,
    MovedCorpus,
    Overwrite,
    Page,
    SkipBadRows,
    Stride,
    Where,
    Window,
    number,
    option,
)
from prismlm.cli.output import console_for_reading, print_cost, print_json
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit

LeastShare = Annotated[
    float, number("S", "A row names every document with at least this share.", most=1)
]


def audit(
    model: Model,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Texts: {TEXT_KINDS}.")],
    lens: Lens = None,
    corpus: MovedCorpus = None,
    where: Where = None,
    by: By = None,
    method: Method = "evidence",
    documents: Annotated[int, number("N", "Documents shown.")] = 10,
    least_share: LeastShare = 0.01,
    window: Window = None,
    stride: Stride = None,
    text_column: Annotated[str, option("NAME", "Of the texts.")] = "text",
    id_column: Annotated[
        str | None, option("NAME", "Of their ids (default: file and row).")
    ] = None,
    skip_bad_rows: SkipBadRows = False,
    parquet: Annotated[Path | None, option("FILE", "Write one row per text.")] = None,
    jsonl: Annotated[Path | None, option("FILE", "The same rows as JSON lines.")] = None,
    csv: Annotated[Path | None, option("FILE", "The largest shares, for a spreadsheet.")] = None,
    html: Page = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Show what a model's predictions over many texts rely on, and write reports."""
    from prismlm.corpus.documents import Columns
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.audit import Audit
    from prismlm.explain.audit_files import estimate_audit
    from prismlm.explain.language_model import load
    from prismlm.explain.texts import text_options
    from prismlm.index.where import parse_where
    from prismlm.run_state import orderly_end

    written = {".parquet": parquet, ".jsonl": jsonl, ".csv": csv, ".html": html}
    check_outputs(*written.values(), inputs=(model, lens, *files), overwrite=overwrite)
    for ending, path in written.items():
        check_ending(path, ending)
    conditions = parse_where(where or [])
    columns = Columns(text=text_column, id=id_column)
    how: dict[str, Any] = {"skip_bad_rows": skip_bad_rows, "answered_chats": "last"}
    reader = DocumentReader(list(files), columns, **how)
    lm = load(model, lens=lens, corpus=corpus)
    reader.tokenizer = lm.tokenizer
    options = text_options([lm], window, stride, method)  # pyright: ignore[reportArgumentType]
    found = Audit(lm, options, conditions, least_share)
    with orderly_end():
        if dry_run:
            print_cost(estimate_audit(found, reader), as_json=as_json)
            return
        rows = [path for path in (parquet, jsonl, csv) if path is not None]
        summary = _run(found, reader, rows, html)
    for path in (*rows, *([] if html is None else [html])):
        typer.echo(f"wrote {path}", err=True)
    print_json(summary) if as_json else _print(found, summary, by or found.lens.telling, documents)


def _run(
    audit: Audit, reader: DocumentReader, paths: list[Path], html: Path | None
) -> dict[str, Any]:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.explain.audit_files import audit_files
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
            add(row.to_dict())
            task.advance(reader.done - done)
            done = reader.done
        summary = audit.to_dict() | {"left_out": dict(reader.left_out)}
        for path in temporary:
            path.write_text(audit_page(summary), encoding="utf-8")
    return summary


def _print(audit: Audit, summary: dict[str, Any], by: str, documents: int) -> None:
    from prismlm.cli.printing.trace import print_documents, print_shares
    from prismlm.corpus.read import counted
    from prismlm.explain.support import levels_in_words
    from prismlm.pages.trace import CAVEAT

    console = console_for_reading()
    ce, explained = summary["ce"], summary["explained_share"]
    console.print(
        f"{summary['texts']:,} texts · {summary['predictions']:,} predictions"
        + (f" · cross-entropy {ce:.3f}" if ce is not None else "")
        + (f" · explained share {explained:.2f}" if explained is not None else "")
        + (f" · left out: {counted(summary['left_out'])}" if summary["left_out"] else "")
    )
    for note in summary["notes"]:
        console.print(note, style="bold", soft_wrap=True)
    if summary["support"] is not None:
        console.print(f"Support: {levels_in_words(summary['support']['levels'])}")
    console.print()
    whole = audit.attribution()
    print_shares(console, whole.sources(by, dict(audit.where)))
    if documents:
        print_documents(console, whole.documents(documents, dict(audit.where)))
    console.print(CAVEAT, style="dim")
