"""Steering: a text generated under an edit, the text without it, and a control."""

from __future__ import annotations

from dataclasses import asdict
from itertools import count
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from prismlm.corpus.chat import Messages, as_chat
from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.language_model import PrismLM
from prismlm.explain.what_if import what_if
from prismlm.explorer.overview import controllers_of
from prismlm.explorer.session import Job, SendEvent, Session
from prismlm.interventions.plan import plan_for
from prismlm.interventions.steering import cautions, steer, strongest
from prismlm.interventions.values import Ablate, Clamp, Controller, Edit, Group, Scale
from prismlm.pages.frame import labelled, rounded

# Tokens: each draw holds the probabilities of the whole vocabulary for each.
MAX_TOKENS = 256
LEADING_PROTOTYPES = 5


class Prompt(BaseModel):
    """A text to continue, or with ``chat`` a user's message to answer."""

    text: str = Field(min_length=1)
    chat: bool = False

    @property
    def source(self) -> str | Messages:
        """The model's input."""
        return as_chat(self.text) if self.chat else self.text


class SteerRequest(Prompt):
    """A prompt, an edit of a prototype or a category, and how to generate."""

    generate: int = Field(default=20, ge=0, le=MAX_TOKENS)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**53)
    prototype: int | None = Field(default=None, ge=0)
    category: str | None = Field(default=None, min_length=1, max_length=1000)
    controller: str | None = Field(default=None, min_length=1, max_length=1000)
    strength: float | None = Field(default=None, ge=-1, le=1, allow_inf_nan=False)
    draws: int = Field(default=8, ge=0, le=16)


class RemovalRequest(Prompt):
    """A prompt, and documents, sources, domains or licences that are left out."""

    without: list[str] = Field(min_length=1, max_length=64)
    generate: int = Field(default=50, ge=1, le=MAX_TOKENS)


def routes(session: Session) -> APIRouter:
    """Return ``/steer``, ``/steer/leading`` and ``/steer/without``; steering can be stopped."""
    router = APIRouter(tags=["steer"])

    @router.post(
        "/steer",
        summary="Write under an edit, beside the text without it; server-sent events: start, "
        "written, done or error",
        response_class=StreamingResponse,
    )
    async def steered(body: SteerRequest) -> StreamingResponse:
        session.queue.check()

        def check() -> Edit:
            edit = edit_of(body, session.lm)
            plan_for(session.lm, [edit])
            # Without generation, every token of the prompt gets a row.
            session.tokens(body.source, body.generate, None if body.generate else MAX_TOKENS)
            return edit

        edit = await run_in_threadpool(check)
        job = Job()
        session.jobs.add(job.id, job)
        return session.streamed(job, lambda send: _steer(session, job, body, edit, send))

    @router.post("/steer/leading", summary="The prototypes that the next token relies on most")
    async def leading(prompt: Prompt) -> dict[str, Any]:
        return await session.queue.run(lambda: _leading(session, prompt.source))

    @router.post("/steer/without", summary="Estimate an answer without documents")
    async def without(body: RemovalRequest) -> dict[str, Any]:
        def estimated() -> dict[str, Any]:
            session.tokens(body.source, body.generate)
            found = what_if(session.lm, body.source, body.without, generate=body.generate)
            return rounded(asdict(found))

        return await session.queue.run(estimated)

    return router


def edit_of(body: SteerRequest, lm: PrismLM) -> Edit:
    """Return the edit for a strength from −1 to 1; without one, of a strength to be found.

    A category becomes a group of that strength. A prototype is clamped at that fraction of the top
    logit; below zero its contribution is scaled by 1 + strength, to nothing at −1.
    """
    targets = ("prototype", "category", "controller")
    given = [name for name in targets if getattr(body, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise InputError(f"expected a prototype, a category or a controller, got {got}.")
    if body.controller is not None:
        if body.strength is not None:
            raise InputError("a controller has its own strengths: leave out strength.")
        if body.controller not in (known := controllers_of(lm)):
            raise InputError(
                f"there is no controller {body.controller!r} in {lm.path}: it has "
                f"{', '.join(known) or 'none; put some into its folder controllers'}."
            )
        return Controller.load(lm.path / body.controller)
    strength = 1.0 if body.strength is None else body.strength
    if body.prototype is None:
        return Group(strength, category=body.category)
    if strength > 0:
        return Clamp(body.prototype, strength)
    if strength == -1:
        return Ablate(body.prototype)
    # Rounded, so that the command line reads the same factor.
    return Scale(body.prototype, round(1 + strength, 6))


def _leading(session: Session, source: str | Messages) -> dict[str, Any]:
    """Return the top token after a text, and the prototypes with the largest shares in its logit.

    Shares are of the sum of positive parts: prototypes, residual and bias.
    """
    session.tokens(source)
    step = session.lm.explain(source)[-1]
    parts = [step.residual, step.bias, *(use.contribution for use in step.prototypes)]
    total = sum(part for part in parts if part > 0)
    leading = [use for use in step.prototypes[:LEADING_PROTOTYPES] if use.contribution > 0]
    return rounded(
        {
            "token": visible(step.pieces[1].label),
            "probability": step.probability,
            "prototypes": [
                labelled(use.id, use.name, use.category) | {"share": use.contribution / total}
                for use in leading
            ],
        }
    )


def _steer(session: Session, job: Job, body: SteerRequest, edit: Edit, send: SendEvent) -> None:
    """Send the number of tokens as both texts are generated, then the effect on each token."""
    lm, source, numbers = session.lm, body.source, count(1)
    send("start", {"id": job.id})

    def enough(_: Tensor) -> bool:
        send("written", {"tokens": next(numbers)})
        return job.stop.is_set()

    options: dict[str, Any] = body.model_dump(include={"generate", "temperature", "seed"})
    options["enough"] = enough
    if body.strength is None and isinstance(edit, (Clamp, Group)):
        edit = strongest(lm, source, edit, **options)
    steering = steer(lm, source, [edit], draws=body.draws, **options)
    strength = body.strength
    if isinstance(edit, (Clamp, Group)):
        strength = edit.fraction if isinstance(edit, Clamp) else edit.strength
    data = asdict(steering) | {"strength": strength, "cautions": cautions(steering)}
    for token in data["tokens"]:
        token["token"] = visible(token["token"])
        for leading in filter(None, (token["leading_before"], token["leading_after"])):
            number = leading["prototype"]
            category = None if lm.lens is None else lm.lens.categories[number]
            leading |= labelled(number, leading["name"], category)
    send("done", rounded(data | {"change": steering.change, "control": steering.control_change}))
