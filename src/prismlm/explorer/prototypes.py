"""Prototypes: a list to search and filter, a card for each, and where each stands on the map."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, BackgroundTasks, Query
from fastapi.responses import Response

from prismlm.errors import InputError
from prismlm.explorer.session import Session, Shown
from prismlm.lens.labels.catalogue import Catalogue, Sort
from prismlm.pages.prototype_map import card_data, map_data

SHOWN = 60
Words = Annotated[str, Query(max_length=1000)]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/prototypes``, and ``/map``."""
    router = APIRouter(tags=["prototypes"])

    def known() -> Catalogue:
        session.lm.lens_for("list of its prototypes")
        assert session.catalogue is not None
        return session.catalogue

    @router.get("/prototypes", summary="Search, filter and sort prototypes")
    def prototypes(
        later: BackgroundTasks,
        query: Words = "",
        category: Words = "",
        sort: Sort = "text",
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = SHOWN,
        at: Annotated[int | None, Query(ge=0)] = None,
        everything: Annotated[bool, Query(alias="all")] = False,
    ) -> dict[str, Any]:
        # The first search would wait for all contexts to be read: they are, once a list is shown.
        catalogue = known()
        if not catalogue.is_loaded:
            later.add_task(lambda: catalogue.texts)
        matching = catalogue.search(query, sort, everything)
        found = catalogue.of_category(matching, category)
        places = [] if at is None else np.flatnonzero(found == at).tolist()
        return {
            "total": len(found),
            "matching": len(matching),
            "items": [card_data(catalogue.row(n)) for n in found[first : first + limit].tolist()],
            "categories": catalogue.counted(matching),
            "place": places[0] if places else None,
        }

    @router.get("/prototypes/{prototype}", summary="The card of a prototype")
    def card(prototype: int) -> dict[str, Any]:
        return card_data(known().card(prototype))

    # As it is sent: putting as many names into JSON takes longer than all else.
    @lru_cache(1)
    def columns(catalogue: Catalogue) -> bytes:
        lens = catalogue.lens
        if lens.meta.map is None or lens.prototypes["x"].null_count:
            raise InputError(
                f"the lens {lens.name} has no map: make it with `prismlm map {session.lm.path}`, "
                "then open the page anew."
            )
        return bytes(Shown(map_data(lens)).body)

    @router.get("/map", summary="Place, category and name of every prototype, by number")
    def the_map() -> Response:
        return Response(columns(known()), media_type="application/json")

    return router
