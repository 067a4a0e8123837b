"""Documents of the corpus: the whole text at a place, and the prototypes it stands behind."""

from __future__ import annotations

from itertools import pairwise
from threading import Lock
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query

from prismlm.corpus.store import Corpus
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError
from prismlm.explain.sources import document_sources
from prismlm.explorer.session import Session
from prismlm.lens.lens import Lens
from prismlm.pages.colours import colour
from prismlm.pages.frame import called

# Characters: of what is sent at once, and of what a long document is opened with.
MOST, WINDOW = 200_000, 60_000
USES = 12
FACTS = ("doc_id", "title", "source", "domain", "license", "url", "start")
Id = Annotated[str, Query(min_length=1, description="Of a document of the corpus.")]
Position = Annotated[int | None, Query(ge=0, lt=2**63, description="A token's, in the corpus.")]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/documents``; ids are of the corpus, never of files."""
    router = APIRouter(tags=["documents"])
    opened: list[Corpus] = []
    # The model's thread reads the same files: a corpus opened twice shares no cache.
    lock = Lock()

    def corpus() -> Corpus:
        lens = session.lm.lens_for("document to show")
        found = lens.corpus
        if found is None:
            raise InputError(
                f"the corpus of the lens is no longer at {lens.corpus_path}, or has changed, so "
                "its documents cannot be shown. Put it back there, or build the lens again with "
                f"`prismlm index {session.lm.path} --corpus DIR --overwrite`; then start the "
                "explorer again."
            )
        if not opened or opened[0].meta is not found.meta:
            opened[:] = [Corpus(found.path, found.meta)]
        return opened[0]

    @router.get("/documents", summary="A document at a place")
    def document(id: Id, at: Position = None) -> dict[str, Any]:
        with lock:
            return _opened(corpus(), id, at)

    @router.get("/documents/text", summary="A further part of a long document")
    def part(
        id: Id, first: Annotated[int, Query(ge=0)], last: Annotated[int, Query(ge=0)]
    ) -> dict[str, Any]:
        if not 0 <= last - first <= MOST:
            raise InputError(f"characters {first} to {last}: expected at most {MOST:,} at once.")
        with lock:
            text = corpus().text(_number(corpus(), id))
        return {"first": first, "last": min(last, len(text)), "text": text[first:last]}

    @router.get("/documents/prototypes", summary="The prototypes that a document stands behind")
    async def prototypes(id: Id) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            with lock:
                own = corpus().documents.value(_number(corpus(), id), "doc_id")
            return _uses(session.lm.lens_for("document to show"), own)

        return await session.line.run(work)

    return router


def _number(corpus: Corpus, doc_id: str) -> int:
    """Return the number of a document, whose id may be given as it is shown."""
    try:
        return corpus.find(doc_id)
    except InputError:
        if "‹U+" in doc_id:
            for number, own in enumerate(corpus.doc_ids):
                if marks_shown(own) == doc_id:
                    return number
        raise


def _opened(corpus: Corpus, doc_id: str, at: int | None) -> dict[str, Any]:
    """Return what is known of a document, and its text around the token at a place."""
    number = _number(corpus, doc_id)
    row = corpus.documents.take(np.array([number])).to_pylist()[0]
    text, start, length = corpus.text(number), row["start"], row["length"]
    mark: list[int] = []
    if at is not None:
        if not start <= at < start + length:
            raise InputError(
                f"position {at:,} is not in the document {row['doc_id']!r}: its tokens are "
                f"{start:,} to {start + length - 1:,}."
            )
        mark = corpus.spans(number)[at - start].tolist()
    left, right = mark or (0, 0)
    first, last = 0, len(text)
    if len(text) > MOST:
        first = max(0, min(left - WINDOW // 2, len(text) - WINDOW))
        last = max(first + WINDOW, right)
    return {name: row[name] for name in FACTS} | {
        "tokens": length,
        "characters": len(text),
        "at": at,
        "first": first,
        "last": last,
        # Before the place, its token, and after it; or all, without a place.
        "parts": [text[a:b] for a, b in pairwise((first, *mark, last))],
    }


def _uses(lens: Lens, doc_id: str) -> dict[str, Any]:
    """Return the prototypes whose cells hold most of a document, or that have it as a context."""
    found = document_sources(lens, doc_id)

    def shown(uses: Any, *figures: str) -> list[dict[str, Any]]:
        return [
            {
                "id": use.prototype,
                "name": called(use.name, use.prototype),
                "category": lens.categories[use.prototype],
                "colour": colour(lens.categories[use.prototype]),
                **{figure: getattr(use, figure) for figure in figures},
            }
            for use in uses[:USES]
        ]

    return {
        "cells": shown(found.cells, "positions", "share"),
        "in_cells": len(found.cells),
        "contexts": shown(found.uses, "rank", "cosine", "position"),
        "in_contexts": len(found.uses),
    }
