"""What the lens holds: prototypes as a list, cards and a map, and the documents of its corpus."""

from __future__ import annotations

from itertools import pairwise
from threading import Lock
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from fastapi.responses import Response

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.explorer.session import PageJSON, Session
from prismlm.lens.labels.catalogue import Catalogue, Sort
from prismlm.pages.prototype_map import card_data, map_data

PAGE_SIZE = 60
# Characters around the place: what a browser lays out in under a second.
MAX_CHARACTERS = 1_000_000
FIELDS = ("doc_id", "title", "source", "domain", "license", "url", "start")
Words = Annotated[str, Query(max_length=1000)]
Id = Annotated[str, Query(min_length=1, description="Of a document of the corpus.")]
Position = Annotated[int | None, Query(ge=0, lt=2**63, description="A token's, in the corpus.")]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/prototypes``, ``/map`` and ``/documents``."""
    router = APIRouter(tags=["lens"])
    _add_prototypes(router, session)
    _add_documents(router, session)
    return router


def _add_prototypes(router: APIRouter, session: Session) -> None:
    def catalogue() -> Catalogue:
        session.lm.lens_for("list of its prototypes")
        session.refresh()
        assert session.catalogue is not None
        return session.catalogue

    @router.get("/prototypes", summary="Search, filter and sort prototypes")
    def prototypes(
        query: Words = "",
        category: Words = "",
        sort: Sort = "text",
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = PAGE_SIZE,
        at: Annotated[int | None, Query(ge=0)] = None,
        everything: Annotated[bool, Query(alias="all")] = False,
    ) -> dict[str, Any]:
        known = catalogue()
        matching = known.search(query, sort, everything)
        listed = known.of_category(matching, category)
        indices = [] if at is None else np.flatnonzero(listed == at).tolist()
        return {
            "total": len(listed),
            "matching": len(matching),
            "items": [card_data(known.row(n)) for n in listed[first : first + limit].tolist()],
            "categories": known.counted(matching),
            "place": indices[0] if indices else None,
        }

    @router.get("/prototypes/{prototype}", summary="The card of a prototype")
    def card(prototype: int) -> dict[str, Any]:
        return card_data(catalogue().card(prototype))

    @router.get("/map", summary="Place, category and name of every prototype, by number")
    def the_map() -> Response:
        lens = catalogue().lens
        if lens.meta.map is None or lens.prototypes["x"].null_count:
            raise InputError(
                f"the lens {lens.name} has no map: make it with `prismlm map {session.lm.path}`, "
                "then open the page anew."
            )
        return PageJSON(map_data(lens))


def _add_documents(router: APIRouter, session: Session) -> None:
    """Add the documents; ids are of the corpus, never of files."""
    opened: list[Corpus] = []
    # The model's thread reads the same files: a second Corpus has a cache of its own.
    lock = Lock()

    @router.get("/documents", summary="A document at a place")
    def document(id: Id, at: Position = None) -> dict[str, Any]:
        lens = session.lm.lens_for("document to show")
        corpus = lens.corpus_for("documents are shown from it")
        with lock:
            if not opened or opened[0].meta is not corpus.meta:
                opened[:] = [Corpus(corpus.path, corpus.meta)]
            return _document(opened[0], id, at)


def _document(corpus: Corpus, doc_id: str, at: int | None) -> dict[str, Any]:
    """Return the fields of a document, and its text around the token at position ``at``."""
    number = corpus.find(doc_id)
    row = corpus.documents.take(np.array([number])).to_pylist()[0]
    text, start, length = corpus.text(number), row["start"], row["length"]
    if at is not None and not start <= at < start + length:
        raise InputError(
            f"position {at:,} is not in the document {row['doc_id']!r}: its tokens are "
            f"{start:,} to {start + length - 1:,}."
        )
    span: list[int] = [] if at is None else corpus.spans(number)[at - start].tolist()
    left, right = span or (0, 0)
    first = max(0, min(left - MAX_CHARACTERS // 2, len(text) - MAX_CHARACTERS))
    last = max(min(first + MAX_CHARACTERS, len(text)), right)
    return {name: row[name] for name in FIELDS} | {
        "tokens": length,
        "characters": len(text),
        "at": at,
        "first": first,
        "last": last,
        # Before the token, the token, and after it; or all, without a position.
        "parts": [text[a:b] for a, b in pairwise((first, *span, last))],
    }
