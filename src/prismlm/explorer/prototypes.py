"""Prototypes: a searchable list, a card for each, and the map."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, BackgroundTasks, Query
from fastapi.responses import Response

from prismlm.errors import InputError
from prismlm.explorer.session import PageJSON, Session
from prismlm.lens.labels.catalogue import Catalogue, Sort
from prismlm.pages.prototype_map import card_data, map_data

PAGE_SIZE = 60
Words = Annotated[str, Query(max_length=1000)]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/prototypes``, and ``/map``."""
    router = APIRouter(tags=["prototypes"])

    def catalogue() -> Catalogue:
        session.lm.lens_for("list of its prototypes")
        assert session.catalogue is not None
        return session.catalogue

    @router.get("/prototypes", summary="Search, filter and sort prototypes")
    def prototypes(
        background: BackgroundTasks,
        query: Words = "",
        category: Words = "",
        sort: Sort = "text",
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = PAGE_SIZE,
        at: Annotated[int | None, Query(ge=0)] = None,
        everything: Annotated[bool, Query(alias="all")] = False,
    ) -> dict[str, Any]:
        known = catalogue()
        if not known.is_loaded:
            # Read all contexts now, so that the first search does not wait for them.
            background.add_task(lambda: known.texts)
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

    return router
