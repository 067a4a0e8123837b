"""prismlm sources: where does one training document show up?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import Json, Lens, Model, TextFiles
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from prismlm.explain.sources import CellUse, DocumentSources, TextUse


def sources(
    model: Model,
    doc: Annotated[str, typer.Option("--doc", metavar="ID", help="The document's id.")],
    file: TextFiles = None,
    audit: Annotated[
        Path | None, typer.Option(metavar="PARQUET", help="Or the rows of an audit.")
    ] = None,
    lens: Lens = None,
    top: Annotated[int, typer.Option(metavar="N", help="Prototypes and texts shown.")] = 10,
    as_json: Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    if file and audit is not None:
        raise InputError("expected texts (--file) or an audit (--audit), got both.")
    if top < 1:
        raise InputError(f"--top is {top}: expected at least 1.")
    from prismlm.explain.language_model import load
    from prismlm.explain.sources import audited_texts_that_rely, document_sources, texts_that_rely
    from prismlm.explain.texts import text_options

    lm = load(model, lens=lens)
    if lm.lens is None:
        raise InputError(
            f"{model} has no lens, so there is no document to find. Build one with "
            f"`prismlm index {model} --corpus DIR`."
        )
    found = document_sources(lm.lens, doc)
    texts: list[TextUse] | None = None
    if audit is not None:
        texts = audited_texts_that_rely(lm.lens, doc, audit)
    elif file:
        from prismlm.corpus.read import DocumentReader

        texts = texts_that_rely(lm, doc, DocumentReader(list(file)), text_options([lm]))
    if as_json:
        listed = None if texts is None else [asdict(text) for text in texts]
        value = {"model": str(model), "lens": str(lm.lens.path), **found.to_dict(), "texts": listed}
        print_json(value)
    else:
        _print(found, texts, top)


def _print(found: DocumentSources, texts: list[TextUse] | None, top: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from prismlm.cli.output import console_for_reading, plain
    from prismlm.index.where import UNKNOWN

    console = console_for_reading()
    console.print(Text(plain(found.title or found.doc_id), style="bold"))
    facts = (found.doc_id, found.source, found.domain, found.license or f"licence {UNKNOWN}")
    console.print(Text(" · ".join(plain(fact) for fact in facts if fact), style="dim"))
    if found.cells is not None:
        _print_cells(console, found.cells, top)
    ratio = found.neighbourhood / found.expected if found.expected else 0.0
    console.print(
        f"among the nearest texts of {len(found.uses)} prototypes, weighed by how often they are "
        f"used {ratio:.1f} times as much as an average document"
    )
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("prototype", "name", "rank", "cosine", "of its contexts", "usage"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for use in found.uses[:top]:
        table.add_row(
            str(use.prototype),
            Text(plain(use.name)),
            f"{use.rank + 1} of {use.contexts}",
            f"{use.cosine:.3f}",
            f"{use.share:.1%}",
            f"{use.usage:.2%}",
        )
    console.print(table)
    if len(found.uses) > top:
        console.print(Text(f"{len(found.uses) - top} more; --top shows them", style="dim"))
    if texts is None:
        return
    console.print()
    console.print(Text("Texts that relied on it", style="bold"))
    for text in texts[:top]:
        line = Text(f"{text.share:>7.2%}  ").append(plain(text.text_id), "bold")
        line.append("  " + " ".join(plain(text.opening).split()), "dim")
        line.truncate(console.width, overflow="ellipsis")
        console.print(line, no_wrap=True)
    if not texts:
        console.print(Text("none", style="dim"))


def _print_cells(console: Console, cells: list[CellUse], top: int) -> None:
    """Print the prototypes whose cells hold the document's positions."""
    from rich.table import Table
    from rich.text import Text

    from prismlm.cli.output import plain

    together = sum(use.positions for use in cells)
    console.print(f"{together:,} positions in the cells of {len(cells):,} prototypes")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("prototype", "name", "positions", "of its cell"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for use in cells[:top]:
        table.add_row(
            str(use.prototype), Text(plain(use.name)), f"{use.positions:,}", f"{use.share:.2%}"
        )
    console.print(table)
    console.print()
