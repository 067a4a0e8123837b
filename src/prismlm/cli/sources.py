"""prismlm sources: where does one training document show up?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from prismlm.cli.options import Json, Lens, Model, TextFiles, number, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.explain.sources import TextUse


def sources(
    model: Model,
    doc: Annotated[str, option("ID", "The document's id.", "--doc")],
    file: TextFiles = None,
    audit: Annotated[
        Path | None,
        option("PARQUET", "Or the rows of an audit, which keep shares from its --least-share on."),
    ] = None,
    lens: Lens = None,
    top: Annotated[int, number("N", "Prototypes and texts shown.", 1)] = 10,
    as_json: Json = False,
) -> None:
    """Show where a training document shows up: its prototypes, and texts that relied on it."""
    if file and audit is not None:
        raise InputError("expected texts (--file) or an audit (--audit), got both.")
    from prismlm.explain.language_model import load
    from prismlm.explain.sources import audited_texts_that_rely, document_sources, texts_that_rely
    from prismlm.explain.texts import text_options

    lm = load(model, lens=lens)
    opened = lm.lens_for("document to find")
    found = document_sources(opened, doc)
    texts: list[TextUse] | None = None
    least: float | None = None
    if audit is not None:
        texts, least = audited_texts_that_rely(opened, doc, audit)
    elif file:
        from prismlm.corpus.read import DocumentReader

        texts = texts_that_rely(lm, doc, DocumentReader(list(file)), text_options([lm]))
    if as_json:
        listed = None if texts is None else [text._asdict() for text in texts]
        value = {"model": str(model), "lens": str(opened.path), **found.to_dict(), "texts": listed}
        print_json(value | ({} if least is None else {"least_share": least}))
        return
    from prismlm.cli.printing.sources import print_sources, print_texts

    print_sources(found, top)
    if texts is not None:
        print_texts(texts, top, least)
