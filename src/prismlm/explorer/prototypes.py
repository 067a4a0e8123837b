"""Prototypes: a list to search and filter, and a card for each."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, Query

from prismlm.errors import InputError
from prismlm.explorer.session import Session
from prismlm.labels.catalogue import Catalogue, Sort
from prismlm.pages.trace_data import hue, safe_link

SHOWN = 60
LONGEST_QUERY = 1000


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/prototypes``."""
    router = APIRouter(tags=["prototypes"])
    lens = session.lm.lens
    catalogue = None if lens is None else Catalogue(lens)

    def known() -> Catalogue:
        if catalogue is None:
            raise InputError(
                f"{session.lm.path} has no lens, so its prototypes have no names and no contexts. "
                "Build one with `prismlm index`."
            )
        return catalogue

    @router.get("/prototypes", summary="Search, filter and sort prototypes")
    def prototypes(
        later: BackgroundTasks,
        query: Annotated[str, Query(max_length=LONGEST_QUERY)] = "",
        category: Annotated[str, Query(max_length=LONGEST_QUERY)] = "",
        sort: Sort = "usage",
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = SHOWN,
        at: Annotated[int | None, Query(ge=0)] = None,
    ) -> dict[str, Any]:
        # The first search would wait for all contexts to be read: they are, once a list is shown.
        later.add_task(lambda: known().trigrams)
        matching = known().search(query, sort)
        found = known().of_category(matching, category)
        rows = [_row(known().row(number)) for number in found[first : first + limit]]
        return {
            "total": len(found),
            "matching": len(matching),
            "items": rows,
            "categories": Counter(filter(None, map(known().lens.categories.__getitem__, matching))),
            "place": found.index(at) if at in found else None,
        }

    @router.get("/prototypes/{prototype}", summary="The card of a prototype")
    def card(prototype: int) -> dict[str, Any]:
        found = _row(known().card(prototype))
        for place in found["contexts"]:
            place["url"] = safe_link(place["url"])
        return found

    return router


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"hue": hue(row["category"], row["id"])}
