"""Prototypes: a list to search and filter, and a card for each."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, BackgroundTasks, Query

from prismlm.explorer.session import Session
from prismlm.lens.labels.catalogue import Catalogue, Sort
from prismlm.pages.colours import colour
from prismlm.pages.trace_data import safe_link

SHOWN = 60
LONGEST_QUERY = 1000


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/prototypes``."""
    router = APIRouter(tags=["prototypes"])

    def known() -> Catalogue:
        session.lm.lens_for("list of its prototypes")
        assert session.catalogue is not None
        return session.catalogue

    @router.get("/prototypes", summary="Search, filter and sort prototypes")
    def prototypes(
        later: BackgroundTasks,
        query: Annotated[str, Query(max_length=LONGEST_QUERY)] = "",
        category: Annotated[str, Query(max_length=LONGEST_QUERY)] = "",
        sort: Sort = "text",
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = SHOWN,
        at: Annotated[int | None, Query(ge=0)] = None,
        everything: Annotated[bool, Query(alias="all")] = False,
    ) -> dict[str, Any]:
        # The first search would wait for all contexts to be read: they are, once a list is shown.
        catalogue = known()
        if not catalogue.read:
            later.add_task(lambda: catalogue.texts)
        matching = catalogue.search(query, sort, everything)
        found = catalogue.of_category(matching, category)
        rows = [_row(catalogue.row(number)) for number in found[first : first + limit].tolist()]
        places = [] if at is None else np.flatnonzero(found == at).tolist()
        return {
            "total": len(found),
            "matching": len(matching),
            "items": rows,
            "categories": catalogue.counted(matching),
            "place": places[0] if places else None,
        }

    @router.get("/prototypes/{prototype}", summary="The card of a prototype")
    def card(prototype: int) -> dict[str, Any]:
        found = _row(known().card(prototype))
        for place in found["contexts"]:
            place["url"] = safe_link(place["url"])
        return found

    return router


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"colour": colour(row["category"])}
