"""Documents of the corpus: the whole text at a place, and the prototypes it stands behind."""

from __future__ import annotations

from itertools import pairwise
from threading import Lock
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from prismlm.corpus.store import Corpus
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError
from prismlm.explain.sources import document_sources
from prismlm.explorer.session import Session
from prismlm.lens.lens import Lens
from prismlm.pages.colours import colour
from prismlm.pages.trace_data import safe_link

# Characters: of what is sent at once, and of what a long document is opened with.
MOST, WINDOW = 200_000, 60_000
USES = 12
FACTS = ("doc_id", "title", "source", "domain", "license")
Id = Annotated[str, Query(min_length=1, description="Of a document of the corpus.")]
Position = Annotated[int | None, Query(ge=0, lt=2**63, description="A token's, in the corpus.")]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/documents``; ids are of the corpus, never of files."""
    router = APIRouter(tags=["documents"])
    reader = Reader(session)

    @router.get("/documents", summary="A document at a place")
    def document(id: Id, at: Position = None) -> dict[str, Any]:
        return reader.opened(id, at)

    @router.get("/documents/text", summary="A further part of a long document")
    def part(
        id: Id,
        first: Annotated[int, Query(ge=0)],
        last: Annotated[int, Query(ge=0)],
    ) -> dict[str, Any]:
        return reader.part(id, first, last)

    @router.get("/documents/prototypes", summary="The prototypes that a document stands behind")
    async def prototypes(id: Id) -> dict[str, Any]:
        lens, own = reader.lens, await run_in_threadpool(reader.own_id, id)
        return await session.line.run(lambda: _uses(lens, own))

    return router


class Reader:
    """Reads the documents of a lens's corpus, one request at a time.

    Args:
        session: whose lens.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._corpus: Corpus | None = None
        # The model's thread reads the same files: a corpus opened twice shares no cache.
        self._lock = Lock()

    @property
    def lens(self) -> Lens:
        """The lens.

        Raises:
            InputError: there is none.
        """
        return self._session.lm.lens_for("document to show")

    @property
    def corpus(self) -> Corpus:
        """The corpus.

        Raises:
            InputError: it is gone, or has changed.
        """
        found = self.lens.corpus
        if found is None:
            raise InputError(
                f"the corpus of the lens is no longer at {self.lens.corpus_path}, or has "
                "changed, so its documents cannot be shown. Put it back there, or build the "
                f"lens again with `prismlm index {self._session.lm.path} --corpus DIR "
                "--overwrite`; then start the explorer again."
            )
        if self._corpus is None or self._corpus.meta is not found.meta:
            self._corpus = Corpus(found.path, found.meta)
        return self._corpus

    def opened(self, doc_id: str, at: int | None) -> dict[str, Any]:
        """Return what is known of a document, and its text around a place.

        Raises:
            InputError: there is no such document, or the place is not in it.
        """
        with self._lock:
            number = self._number(doc_id)
            row = self.corpus.documents.take(np.array([number])).to_pylist()[0]
            text = self.corpus.text(number)
            mark = None if at is None else self._mark(number, row, at)
        left, right = mark or (0, 0)
        first, last = 0, len(text)
        if len(text) > MOST:
            first = max(0, min(left - WINDOW // 2, len(text) - WINDOW))
            last = max(first + WINDOW, right)
        edges = (first, *(mark or ()), last)
        return {name: row[name] for name in FACTS} | {
            "url": safe_link(row["url"]),
            "start": row["start"],
            "tokens": row["length"],
            "characters": len(text),
            "at": at,
            "first": first,
            "last": last,
            # Before the place, its token, and after it; or all, without a place.
            "parts": [text[a:b] for a, b in pairwise(edges)],
        }

    def part(self, doc_id: str, first: int, last: int) -> dict[str, Any]:
        """Return some characters of a document, at most 200,000.

        Raises:
            InputError: there is no such document, or more are asked for.
        """
        if not 0 <= last - first <= MOST:
            raise InputError(f"characters {first} to {last}: expected at most {MOST:,} at once.")
        with self._lock:
            text = self.corpus.text(self._number(doc_id))
        return {"first": first, "last": min(last, len(text)), "text": text[first:last]}

    def own_id(self, doc_id: str) -> str:
        """Return the id of a document as the corpus has it.

        Raises:
            InputError: there is no such document.
        """
        with self._lock:
            return self.corpus.documents.value(self._number(doc_id), "doc_id")

    def _number(self, doc_id: str) -> int:
        """Return the number of a document, whose id may be given as it is shown."""
        try:
            return self.corpus.find(doc_id)
        except InputError:
            if "‹U+" in doc_id:
                for number, own in enumerate(self.corpus.doc_ids):
                    if marks_shown(own) == doc_id:
                        return number
            raise

    def _mark(self, number: int, row: dict[str, Any], at: int) -> tuple[int, int]:
        """Return the characters of the token at a global position."""
        start, length = row["start"], row["length"]
        if not start <= at < start + length:
            raise InputError(
                f"position {at:,} is not in the document {row['doc_id']!r}: its tokens are "
                f"{start:,} to {start + length - 1:,}."
            )
        left, right = self.corpus.spans(number)[at - start].tolist()
        return left, right


def _uses(lens: Lens, doc_id: str) -> dict[str, Any]:
    """Return the prototypes whose cells hold most of a document, or that have it as a context."""
    found = document_sources(lens, doc_id)
    cells, uses = found.cells, found.uses

    def named(prototype: int, **figures: Any) -> dict[str, Any]:
        category = lens.categories[prototype]
        return {
            "id": prototype,
            "name": lens.names[prototype],
            "category": category,
            "colour": colour(category),
        } | figures

    return {
        "cells": [named(c.prototype, positions=c.positions, share=c.share) for c in cells[:USES]],
        "in_cells": len(cells),
        "contexts": [
            named(u.prototype, rank=u.rank, cosine=u.cosine, position=u.position)
            for u in uses[:USES]
        ],
        "in_contexts": len(uses),
    }
