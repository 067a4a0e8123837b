"""Steering: a text written under an edit, beside the text without it and under its control."""

from __future__ import annotations

from itertools import count
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explorer.session import Job, Prompt, Session, Tell, Writing
from prismlm.interventions.plan import plan_for
from prismlm.interventions.steering import cautions, steer
from prismlm.interventions.strength import strongest
from prismlm.interventions.values import Ablate, Clamp, Edit, Group, Scale
from prismlm.pages.colours import colour
from prismlm.pages.frame import called, rounded

# Tokens: of each, the probabilities of the whole vocabulary are held for each draw.
SHOWN = 256
OFFERED = 5


class Wanted(Writing):
    """An edit of a prototype or a category, and what is written under it."""

    prototype: int | None = Field(default=None, ge=0)
    category: str | None = Field(default=None, min_length=1, max_length=1000)
    strength: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    generate: int = Field(default=20, ge=0, le=SHOWN)
    draws: int = Field(default=8, ge=0, le=16)


def routes(session: Session) -> APIRouter:
    """Return ``/steer`` and what to begin with; what is written is stopped as an answer is."""
    router = APIRouter(tags=["steer"])

    @router.post(
        "/steer",
        summary="Write under an edit, beside the text without it; server-sent events: start, "
        "written, done or error",
        response_class=StreamingResponse,
    )
    async def steered(wanted: Wanted) -> StreamingResponse:
        session.line.check()

        def check() -> Edit:
            edit = edit_of(wanted)
            plan_for(session.lm, [edit])
            # Of a text that is only read each token gets a row.
            most = None if wanted.generate else SHOWN
            session.tokens(wanted.put, wanted.generate, "steer", most)
            return edit

        edit = await run_in_threadpool(check)
        job = Job()
        session.jobs.add(job.id, job)
        return session.streamed(job, lambda tell: _steer(session, job, wanted, edit, tell))

    @router.post("/steer/leading", summary="The prototypes that the next token relies on most")
    async def leading(prompt: Prompt) -> dict[str, Any]:
        return await session.line.run(lambda: _leading(session, prompt.put))

    return router


def edit_of(wanted: Wanted) -> Edit:
    """Return the edit that a strength from −1 to 1 means.

    A category is a group of that strength. A prototype is held at that fraction of the top logit;
    below zero what it gives is scaled by 1 + strength, to nothing at −1. Without a strength it is
    the edit whose strength is still to be found.

    Raises:
        InputError: not exactly one of prototype and category.
    """
    if (wanted.prototype is None) == (wanted.category is None):
        had = "neither" if wanted.prototype is None else "both"
        raise InputError(f"expected a prototype or a category to steer, got {had}.")
    strength = 1.0 if wanted.strength is None else wanted.strength
    if wanted.prototype is None:
        return Group(strength, category=wanted.category)
    if strength > 0:
        return Clamp(wanted.prototype, strength)
    if strength == -1:
        return Ablate(wanted.prototype)
    # To the digits that a strength is given in, so that a terminal reads the same factor.
    return Scale(wanted.prototype, round(1 + strength, 6))


def _leading(session: Session, text: str | Messages) -> dict[str, Any]:
    """Return the top token after a text, and the prototypes with the largest shares in it.

    Shares are of all that raises its logit: what is above zero of prototypes, residual and bias.
    """
    session.tokens(text, 0, "explain")
    step = session.lm.explain(text)[-1]
    parts = [step.residual, step.bias, *(use.contribution for use in step.prototypes)]
    raised = sum(part for part in parts if part > 0)
    prototypes = [
        {
            "id": use.id,
            "name": called(use.name, use.id),
            "colour": colour(use.category),
            "share": use.contribution / raised,
        }
        for use in step.prototypes[:OFFERED]
        if use.contribution > 0
    ]
    token = {"token": visible(step.pieces[1].label), "probability": step.probability}
    return rounded(token | {"prototypes": prototypes})


def _steer(session: Session, job: Job, wanted: Wanted, edit: Edit, tell: Tell) -> None:
    """Tell how many tokens of both texts are written, and what the edit did to each."""
    lm, told = session.lm, count(1)
    tell("start", {"id": job.id})

    def enough(_: Tensor) -> bool:
        tell("written", {"tokens": next(told)})
        return job.stop.is_set()

    how: dict[str, Any] = wanted.how | {"enough": enough}
    if wanted.strength is None and isinstance(edit, (Clamp, Group)):
        edit = strongest(lm, wanted.put, edit, **how)
    found = steer(lm, wanted.put, [edit], draws=wanted.draws, **how)
    strength = wanted.strength
    if isinstance(edit, (Clamp, Group)):
        strength = edit.fraction if isinstance(edit, Clamp) else edit.strength
    value = found.to_dict() | {"strength": strength, "cautions": cautions(found)}
    for token in value["tokens"]:
        token["token"] = visible(token["token"])
        for leading in filter(None, (token["leading_before"], token["leading_after"])):
            categories = None if lm.lens is None else lm.lens.categories
            leading["name"] = called(leading["name"], leading["prototype"])
            leading["colour"] = colour(categories and categories[leading["prototype"]])
    tell("done", rounded(value | {"change": found.change, "control": found.control_change}))
