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
from prismlm.errors import InputError
from prismlm.explorer.session import Answer, Prompt, Session, within
from prismlm.explorer.streams import Tell, streamed
from prismlm.interventions.plan import plan_for
from prismlm.interventions.steering import cautions, steer
from prismlm.interventions.strength import strongest
from prismlm.interventions.values import Ablate, Clamp, Edit, Group, Scale
from prismlm.pages.colours import colour
from prismlm.pages.trace_data import rounded, visible

# Tokens: of each, the probabilities of the whole vocabulary are held for each draw.
SHOWN = 256
OFFERED = 5


class Wanted(Prompt):
    """An edit of a prototype or a category, and what is written under it."""

    prototype: int | None = Field(default=None, ge=0)
    category: str | None = Field(default=None, min_length=1, max_length=1000)
    strength: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    generate: int = Field(default=20, ge=0, le=SHOWN)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**53)
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
        edit = await run_in_threadpool(lambda: _checked(session, wanted))
        answer = session.keep(Answer())
        return streamed(session, answer, lambda tell: _steer(session, answer, wanted, edit, tell))

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


def _checked(session: Session, wanted: Wanted) -> Edit:
    """Return the edit; raise InputError for one that the model does not have, or a long text."""
    lm, most = session.lm, session.limits.tokens
    edit = edit_of(wanted)
    plan_for(lm, [edit])
    # Of a text that is only read each token gets a row.
    within(lm, wanted.put, wanted.generate, most if wanted.generate else SHOWN, "steer")
    return edit


def _leading(session: Session, text: str | Messages) -> dict[str, Any]:
    """Return the top token after a text, and the prototypes with the largest shares in it.

    Shares are of all that raises its logit: what is above zero of prototypes, residual and bias.
    """
    within(session.lm, text, 0, session.limits.tokens, "explain")
    step = session.lm.explain(text)[-1]
    parts = [step.residual, step.bias, *(use.contribution for use in step.prototypes)]
    raised = sum(part for part in parts if part > 0)
    found = [use for use in step.prototypes[:OFFERED] if use.contribution > 0]
    return rounded(
        {
            "token": visible(step.pieces[1].label),
            "probability": step.probability,
            "prototypes": [
                {
                    "id": use.id,
                    "name": use.name or f"prototype {use.id}",
                    "colour": colour(use.category),
                    "share": use.contribution / raised,
                }
                for use in found
            ],
        }
    )


def _steer(session: Session, answer: Answer, wanted: Wanted, edit: Edit, tell: Tell) -> None:
    """Tell how many tokens of both texts are written, and what the edit did to each."""
    lm, told = session.lm, count(1)
    tell("start", {"id": answer.id})

    def enough(_: Tensor) -> bool:
        tell("written", {"tokens": next(told)})
        return answer.stop.is_set()

    how = wanted.model_dump(include={"generate", "temperature", "seed"})
    if wanted.strength is None and isinstance(edit, (Clamp, Group)):
        edit = strongest(lm, wanted.put, edit, **how, enough=enough)
    found = steer(lm, wanted.put, [edit], **how, draws=wanted.draws, enough=enough)
    strength = edit.fraction if isinstance(edit, Clamp) else wanted.strength
    strength = edit.strength if isinstance(edit, Group) else strength
    value = found.to_dict() | {"strength": strength, "cautions": cautions(found)}
    for token in value["tokens"]:
        token["token"] = visible(token["token"])
        for leading in (token["leading_before"], token["leading_after"]):
            if leading is not None:
                number = leading["prototype"]
                own = None if lm.lens is None else lm.lens.categories[number]
                leading["colour"] = colour(own)
    tell("done", rounded(value | {"change": found.change, "control": found.control_change}))
