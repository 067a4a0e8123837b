"""prismlm sources: where does one training document show up?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text

from prismlm.cli.options import Json, Lens, Model, MovedCorpus, TextFiles, number, option
from prismlm.cli.output import console_for_reading, fit_ends, fit_name, plain, print_json, table_of
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.explain.sources import DocumentSources, TextUses
NAME_WIDTH = 28


def sources(
    model: Model,
    doc: Annotated[str, option("ID", "The document's id.", "--doc")],
    file: TextFiles = None,
    audit: Annotated[
        Path | None,
        option("PARQUET", "Or the rows of an audit, which keep shares from its --least-share on."),
    ] = None,
    lens: Lens = None,
    corpus: MovedCorpus = None,
    top: Annotated[int, number("N", "Prototypes and texts shown.", 1)] = 10,
    as_json: Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    if file and audit is not None:
        raise InputError("expected texts (--file) or an audit (--audit), got both.")
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
        from prismlm.corpus.read import DocumentReader

        reader = DocumentReader(list(file), tokenizer=lm.tokenizer, answered_chats="last")
        texts = texts_that_rely(lm, doc, reader, text_options([lm]))
        left_out = dict(reader.left_out)
    if as_json:
        listed = None if texts is None else [text._asdict() for text in texts.texts]
        value = {"model": str(model), "lens": str(opened.path), **asdict(found), "texts": listed}
        if texts is not None:
            value |= {"texts_read": texts.read, "share": texts.share, "left_out": left_out}
        print_json(
            value | ({} if texts is None or texts.least is None else {"least_share": texts.least})
        )
        return
    console = console_for_reading()
    console.print(plain(found.sentence(texts)), style="bold")
    print_sources(console, found, top)
    if texts is not None:
        print_texts(console, texts, top)
    if left_out:
        from prismlm.corpus.read import counted

        console.print(f"left out: {counted(left_out)}", style="dim")


def print_sources(console: Console, found: DocumentSources, top: int) -> None:
    """Print a document and the prototypes that it is behind."""
    from prismlm.index.where import UNKNOWN

    facts = (found.doc_id, found.source, found.domain, found.license or f"licence {UNKNOWN}")
    console.print(" · ".join(plain(fact) for fact in facts if fact), style="dim")
    console.print()
    if found.cells is not None:
        places = sum(use.positions for use in found.cells)
        console.print(
            f"The {places:,} tokens of it are in the cells of {len(found.cells):,} prototypes"
        )
        _print_table(
            console,
            ("tokens", "of all in its cell"),
            [
                (use.prototype, use.name, f"{use.positions:,}", f"{use.share:.2%}")
                for use in found.cells
            ],
            top,
        )
    console.print(f"It is among the nearest texts of {len(found.uses):,} prototypes")
    _print_table(
        console,
        ("nearness", "cosine", "of its texts", "of all tokens"),
        [
            (
                *(use.prototype, use.name, f"{use.rank + 1} of {use.contexts}"),
                *(f"{use.cosine:.3f}", f"{use.share:.1%}", f"{use.usage:.2%}"),
            )
            for use in found.uses
        ],
        top,
    )


def _print_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[object]], top: int
) -> None:
    table = table_of("*prototype", "name", *(f"*{heading}" for heading in headings))
    for prototype, name, *figures in rows[:top]:
        shown = fit_name(plain(str(name)), NAME_WIDTH)
        table.add_row(str(prototype), Text(shown), *map(str, figures))
    console.print(table)
    _print_more(console, len(rows) - top)
    console.print()


def print_texts(console: Console, texts: TextUses, top: int) -> None:
    """Print the texts that relied on a document."""
    from prismlm.pages.audit import told_apart

    head = Text("Texts that relied on it", style="bold")
    if texts.least:
        head.append(f"  shares below {texts.least:.2%} are not in the audit", "dim")
    console.print(head)
    shown = texts.texts[:top]
    openings = told_apart([" ".join(text.opening.split()) for text in shown])
    for text, opening in zip(shown, openings, strict=True):
        line = Text(f"{text.share:>7.2%}  ")
        line.append(fit_ends(plain(text.text_id), console.width // 2 - 10), "bold")
        line.append(f"  {plain(opening)}", "dim").truncate(console.width, overflow="ellipsis")
        console.print(line, no_wrap=True)
    if not texts.texts:
        console.print("none", style="dim")
    _print_more(console, len(texts.texts) - top)


def _print_more(console: Console, more: int) -> None:
    if more > 0:
        console.print(f"{more:,} more; --top shows them", style="dim")
