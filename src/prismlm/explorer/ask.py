"""An answer that the server generated or read, its sources, and its predictions."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response

from prismlm.errors import InputError
from prismlm.explain.trace import Trace
from prismlm.explorer.session import PageJSON, Session, saved
from prismlm.files import json_text
from prismlm.pages.frame import rounded
from prismlm.pages.trace import Pool, sources_data, trace_data

OPPOSING_PASSAGES = 4
PASSAGES = 8


def routes(session: Session) -> APIRouter:
    """Return the routes about an answer, whichever client of the server requested it."""
    router = APIRouter(tags=["ask"])
    answers = session.server.answers

    @router.get("/answers/{key}", summary="An answer, what it relies on, and each prediction")
    def answer(key: str) -> Response:
        trace = session.trace(key)
        pool = Pool(trace.lens)
        data = trace_data(trace, pool, each=False)
        return PageJSON(data | {"id": key, "shared": pool.to_dict()})

    @router.get("/answers/{key}/asked", summary="What it answers, and the chat up to it")
    def asked(key: str) -> Response:
        answer = answers[key]
        data = {"text": answer.trace.question, "messages": list(answer.messages)}
        # Direction marks stay: the model reads the same text again.
        return Response(json_text(data), media_type="application/json")

    @router.post("/answers/{key}/stop", summary="Stop writing")
    def stop(key: str) -> dict[str, bool]:
        if key in session.jobs:
            session.jobs[key].stop.set()
        elif (generation := session.server.unfinished.get(key)) is not None:
            generation.stop_requested = True
        else:
            _ = answers[key]
        return {"stopped": True}

    @router.get("/answers/{key}/report.{kind}", summary="html, json or parquet")
    def report(key: str, kind: Literal["html", "json", "parquet"]) -> Response:
        return saved(f"answer.{kind}", getattr(session.trace(key), f"to_{kind}"))

    _add_steps(router, session)
    return router


def _add_steps(router: APIRouter, session: Session) -> None:
    """Add the routes about one prediction."""

    def step_of(key: str, step: int) -> Trace:
        trace = session.trace(key)
        if not 0 <= step < len(trace):
            raise InputError(f"there is no step {step}: the answer has {len(trace):,}, from 0.")
        return trace[step : step + 1]

    @router.get("/answers/{key}/steps/{step}", summary="What stands behind one prediction")
    def step(key: str, step: int) -> Response:
        trace = step_of(key, step)
        pool = Pool(trace.lens)
        # Rounded and encoded in this thread: others are waiting.
        data = rounded(sources_data(trace, pool, PASSAGES))
        return PageJSON(data | {"shared": pool.to_dict()})

    @router.get("/answers/{key}/steps/{step}/against", summary="What speaks against it")
    async def against(key: str, step: int) -> Response:
        trace = step_of(key, step)

        def work() -> Response:
            pool = Pool(trace.lens)
            passages = [pool.shared(passage) for passage in trace.against(OPPOSING_PASSAGES)]
            return PageJSON(rounded({"against": passages}) | {"shared": pool.to_dict()})

        return await session.queue.run(work)
