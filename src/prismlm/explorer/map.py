"""The map: where every prototype stands, and what it is called."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from prismlm.errors import InputError
from prismlm.explorer.session import Session
from prismlm.explorer.streams import sent
from prismlm.lens.labels.map import regions
from prismlm.pages.colours import colour

# Digits of a place: a map is some tens across, and a screen some thousand points.
DIGITS = 3


def routes(session: Session) -> APIRouter:
    """Return ``/map``."""
    router = APIRouter(tags=["map"])
    # As it is sent: putting as many names into JSON takes longer than all else.
    known = lru_cache(1)(lambda catalogue: sent(_columns(session)).encode())

    @router.get(
        "/map",
        summary="Place, category and name of every prototype, by number",
        response_model=dict[str, Any],
    )
    def prototypes() -> Response:
        return Response(known(session.catalogue), media_type="application/json")

    return router


def _columns(session: Session) -> dict[str, Any]:
    """Return columns with an entry for each prototype; its category is a number, −1 for none."""
    path, lens = session.lm.path, session.lm.lens_for("map")
    table = lens.prototypes
    if lens.meta.map is None or table["x"].null_count:
        raise InputError(
            f"the lens {lens.name} has no map: make it with `prismlm map {path}`, then open the "
            "page anew."
        )
    names = sorted({name for name in lens.categories if name is not None})
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "x": table["x"].to_numpy().astype(np.float64).round(DIGITS).tolist(),
        "y": table["y"].to_numpy().astype(np.float64).round(DIGITS).tolist(),
        "category": [-1 if name is None else numbers[name] for name in lens.categories],
        "names": lens.names,
        "leading": lens.leading.tolist(),
        "listed": lens.listed.tolist(),
        "categories": [{"name": name, "colour": colour(name)} for name in names],
        "regions": regions(lens),
    }
