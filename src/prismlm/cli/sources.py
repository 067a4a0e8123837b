"""prismlm sources: where does one training document show up?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli.options import option
from prismlm.cli.output import fit_ends, print_json, say, show_rows
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.explain.sources import CellUse, DocumentSources, DocumentUse, TextUses


def sources(
    model: opt.Model,
    doc: Annotated[str, option("ID", "The document's id.", "--doc")],
    file: opt.TextFiles = None,
    audit: Annotated[Path | None, option("PARQUET", "Or the rows of an audit.")] = None,
    lens: opt.Lens = None,
    corpus: opt.MovedCorpus = None,
    top: Annotated[int, option("N", "Prototypes and texts shown.", least=1)] = 10,
    as_json: opt.Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    if file and audit is not None:
        raise InputError("expected texts (--file) or an audit (--audit), got both.")
    from prismlm.corpus.read import DocumentReader, counted
    from prismlm.explain.language_model import load
    from prismlm.explain.sources import audited_texts_that_rely, document_sources, texts_that_rely
    from prismlm.explain.texts import text_options

    lm = load(model, lens=lens, corpus=corpus)
    opened = lm.lens_for("document to find")
    found = document_sources(opened, doc)
    texts: TextUses | None = None
    left_out: dict[str, int] = {}
    if audit is not None:
        texts = audited_texts_that_rely(opened, doc, audit)
    elif file:
        reader = DocumentReader(list(file), tokenizer=lm.tokenizer, answered_chats="last")
        texts = texts_that_rely(lm, doc, reader, text_options([lm]))
        left_out = dict(reader.left_out)
    if as_json:
        listed = None if texts is None else [text._asdict() for text in texts.texts]
        value = {"model": str(model), "lens": str(opened.path), **asdict(found), "texts": listed}
        if texts is not None:
            value |= {"texts_read": texts.read, "share": texts.share, "left_out": left_out}
            value |= {} if texts.least is None else {"least_share": texts.least}
        print_json(value)
        return
    say(found.sentence(texts), style="bold")
    _print_sources(found, top)
    if texts is not None:
        _print_texts(texts, top)
    if left_out:
        say(f"left out: {counted(left_out)}", style="dim")


def _print_sources(found: DocumentSources, top: int) -> None:
    """Print a document and the prototypes that it is behind."""
    from prismlm.index.where import UNKNOWN

    facts = (found.doc_id, found.source, found.domain, found.license or f"licence {UNKNOWN}")
    say(" · ".join(fact for fact in facts if fact) + "\n", style="dim")
    if found.cells is not None:
        tokens = sum(use.positions for use in found.cells)
        title = f"The {tokens:,} tokens of it are in the cells of {len(found.cells):,} prototypes"
        columns = {"prototype": "", "name": "", "positions": ",", "share": ".2%"}
        show_rows(title, columns, [_row(use) for use in found.cells[:top]])
    title = f"It is among the nearest texts of {len(found.uses):,} prototypes"
    columns = {"prototype": "", "name": "", "nearness": "", "cosine": ".3f"}
    columns |= {"share": ".1%", "usage": ".2%"}
    uses = [
        _row(use) | {"nearness": f"{use.rank + 1} of {use.contexts}"} for use in found.uses[:top]
    ]
    show_rows(title, columns, uses)
    if (more := max(len(found.cells or ()), len(found.uses)) - top) > 0:
        say(f"{more:,} more; --top shows them\n", style="dim")


def _row(use: CellUse | DocumentUse) -> dict[str, Any]:
    return vars(use) | {"name": fit_ends(use.name, 28)}


def _print_texts(texts: TextUses, top: int) -> None:
    """Print the texts that relied on a document."""
    from prismlm.pages.audit import told_apart

    shown = texts.texts[:top]
    openings = told_apart([" ".join(text.opening.split()) for text in shown])
    rows = [
        {"share": text.share, "text": fit_ends(text.text_id, 30), "opening": fit_ends(opening, 50)}
        for text, opening in zip(shown, openings, strict=True)
    ]
    title = "Texts that relied on it" if rows else "No text relied on it"
    if texts.least:
        title += f"; shares below {texts.least:.2%} are not in the audit"
    show_rows(title, {"share": ".2%", "text": "", "opening": ""}, rows)
    if len(texts.texts) > top:
        say(f"{len(texts.texts) - top:,} more; --top shows them", style="dim")
