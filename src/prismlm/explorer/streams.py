"""Long work told to a page as it goes on: server-sent events, from a thread that can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import CancelScope
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from prismlm.direction_marks import marks_shown
from prismlm.errors import PrismError, no_panics
from prismlm.explorer.session import Answer, Busy, Session
from prismlm.files import json_text

# Tells an event by its name and value; work may call it from its thread.
Tell = Callable[[str, dict[str, Any]], None]


def streamed(session: Session, answer: Answer, work: Callable[[Tell], None]) -> StreamingResponse:
    """Return the events that ``work`` tells, once it is its turn to use the model.

    Before it there may be ``waiting``; an error of ours ends it as ``error``. Whoever leaves sets
    ``answer.stop``, which ``work`` is to look at.

    Raises:
        Busy: too many wait.
    """
    session.line.check()
    return StreamingResponse(_events(session, answer, work), media_type="text/event-stream")


async def _events(
    session: Session, answer: Answer, work: Callable[[Tell], None]
) -> AsyncIterator[str]:
    try:
        if session.line.before:
            yield _event("waiting", {"before": session.line.before})
        async with session.line.turn():
            async for event in _told(answer, work):
                yield event
    except Busy:
        yield _event("error", {"error": "busy: others wait for the model already."})


async def _told(answer: Answer, work: Callable[[Tell], None]) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[str | None] = asyncio.Queue()

    def put(event: str | None) -> None:
        loop.call_soon_threadsafe(told.put_nowait, event)

    def run() -> None:
        try:
            with no_panics():
                work(lambda name, value: put(_event(name, value)))
        except PrismError as error:
            put(_event("error", {"error": str(error)}))
        finally:
            put(None)

    task = asyncio.ensure_future(run_in_threadpool(run))
    try:
        while (event := await told.get()) is not None:
            yield event
    finally:
        # Whoever left does not read on; the next in line waits until the thread has ended.
        answer.stop.set()
        with CancelScope(shield=True):
            await asyncio.wait([task])


def _event(name: str, value: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {sent(value)}\n\n"


def sent(value: Any) -> str:
    """Return JSON in which marks that turn the direction of writing are shown, and turn nothing."""
    return marks_shown(json_text(value, separators=(",", ":")))
