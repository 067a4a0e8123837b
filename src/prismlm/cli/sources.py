"""prismlm sources: where does one training document show up?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option
from prismlm.errors import InputError


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
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.language_model import load
    from prismlm.explain.sources import audited_texts_that_rely, document_sources, texts_that_rely
    from prismlm.explain.texts import text_options

    lm = load(model, lens=lens, corpus=corpus)
    opened = lm.lens_for("document to find")
    found, texts, left_out = document_sources(opened, doc), None, dict[str, int]()
    if audit is not None:
        texts = audited_texts_that_rely(opened, doc, audit)
    elif file:
        reader = DocumentReader(list(file), tokenizer=lm.tokenizer, answered_chats="last")
        texts = texts_that_rely(lm, doc, reader, text_options([lm]))
        left_out = dict(reader.left_out)
    value: dict[str, Any] = {"model": str(model), "lens": str(opened.path), **asdict(found)}
    value["texts"] = None
    if texts is not None:
        value["texts"] = [text._asdict() for text in texts.texts]
        value |= {"texts_read": texts.read, "share": texts.share, "left_out": left_out}
        value |= {} if texts.least is None else {"least_share": texts.least}
    if as_json:
        output.print_json(value)
    else:
        output.say(found.sentence(texts) + "\n", style="bold")
        output.show_value(value, top)
