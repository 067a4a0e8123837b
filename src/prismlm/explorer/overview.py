"""What the model is and has, and what it lacks, for the page's head and its first view."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter

from prismlm.explorer.session import Session
from prismlm.lens.cells import Cells
from prismlm.lens.labels.map import worth_seeing
from prismlm.lens.layout import trained_on_words
from prismlm.lens.lens import Lens
from prismlm.models.sidecar import load_sidecar
from prismlm.pages.colours import colour
from prismlm.pages.trace_data import rounded

# Domains or sources.
SHOWN = 12


def routes(session: Session) -> APIRouter:
    """Return ``/model``."""
    router = APIRouter(tags=["model"])

    @router.get("/model", summary="What the model is and has")
    def model() -> dict[str, Any]:
        session.look_again()
        return overview(session)

    return router


def overview(session: Session) -> dict[str, Any]:
    """Return what the page says of the model before anything is asked."""
    lm, lens = session.lm, session.lm.lens
    seen = Counter(filter(None, [] if lens is None else lens.categories))
    return {
        "name": lm.path.resolve().name,
        "base": load_sidecar(lm.path).base.name.removesuffix(".gguf"),
        "path": str(lm.path),
        "kind": type(lm.model).__name__,
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "prototypes": lm.head.num_prototypes,
        "prototypes_per_token": lm.head.prototypes_per_token,
        "lens": None if lens is None else _lens(lens),
        "missing": _missing(session),
        "categories": [
            {"name": name, "prototypes": count, "colour": colour(name)}
            for name, count in seen.most_common()
        ],
        "prompts": session.prompts,
        "chat": bool(lm.tokenizer.chat_template),
        "questions": session.questions,
        "texts": session.texts,
        "limits": {"tokens": session.limits.tokens, "audited": session.limits.audited},
    }


def _lens(lens: Lens) -> dict[str, Any]:
    meta = lens.meta
    trained = meta.trained_on
    return {
        "name": lens.name,
        "tokens": meta.tokens,
        "documents": meta.documents,
        "trained_on": None if trained is None else trained_on_words(trained, meta.split),
        "verbatim": lens.suffixes is not None,
        "map": meta.map is not None,
        "labels": meta.labels is not None,
        "corpus": lens.corpus is not None,
        "opening": worth_seeing(lens),
        "shares": _shares(lens.cells),
    }


def _shares(cells: Cells) -> dict[str, Any] | None:
    """Return the share of each domain, or else source, in all positions; None where that is one."""
    for by in ("domain", "source"):
        rates = cells.base_rates(by).tolist()
        items = sorted(zip(cells.keys(by).names, rates, strict=True), key=lambda one: -one[1])
        if len(items) > 1:
            others = [rate for _, rate in items[SHOWN:]]
            shown = [list(one) for one in items[:SHOWN]]
            return rounded({"by": by, "items": shown, "others": [len(others), sum(others)]})
    return None


def _missing(session: Session) -> list[dict[str, str]]:
    """Return what the model could have, and the command that makes it."""
    lm, lens = session.lm, session.lm.lens
    name = str(lm.path)
    index = f"prismlm index {name} --corpus DIR"
    if lens is None:
        return [{"what": "a lens: no training text can be named", "command": index}]
    places = f"the corpus at {lens.corpus_path}: it is not there, or has changed"
    parts = (
        (
            lens.cells,
            "cells: documents are named, no passages",
            f"{index} --positions 1 --overwrite",
        ),
        (lens.meta.labels, "names of prototypes", f"prismlm label {name}"),
        (lens.meta.map, "a map of prototypes", f"prismlm map {name}"),
        (lens.corpus, places, f"{index} --overwrite"),
    )
    return [{"what": what, "command": command} for part, what, command in parts if part is None]
