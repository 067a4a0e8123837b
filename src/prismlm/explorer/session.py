"""The state of one explorer: the model, its request queue, and recent answers and audits."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from mimetypes import guess_type
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anyio import CancelScope
from fastapi.responses import JSONResponse, Response, StreamingResponse

from prismlm.corpus.chat import Messages
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError, PrismError, no_panics
from prismlm.explain.audit import Audit
from prismlm.explain.trace import Trace
from prismlm.files import json_text
from prismlm.lens.labels.catalogue import Catalogue
from prismlm.web.engine import Busy, RequestQueue
from prismlm.web.server import Recent, Server

# Sends an event by its name and data; callable from any thread.
SendEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """Limits of the explorer."""

    tokens: int = 2048  # of an answer that is shown, with its prompt, and of a steered text
    audited: int = 2_000_000  # characters of all texts of an audit
    waiting: int = 8  # requests that may wait for the model
    answers: int = 32  # recent answers, and as many audits, that can be asked about


@dataclass
class Job:
    """A running request, which can be stopped; an audit keeps its rows and summary for files."""

    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    stop: threading.Event = field(default_factory=threading.Event)
    audit: Audit | None = None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])


class PageJSON(JSONResponse):
    """JSON in which text direction marks are replaced by their visible codes."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return _encoded(content).encode()


class Session:
    """A model being explored: its server with recent answers, and what else the views share.

    ``queue`` is of requests to the model other than generation.
    """

    def __init__(
        self,
        server: Server,
        limits: Limits,
        prompts: Mapping[str, str],
        questions: Mapping[str, str],
    ) -> None:
        self.server, self.lm, self.limits, self.prompts = server, server.lm, limits, dict(prompts)
        self.questions = dict(questions) if self.lm.tokenizer.chat_template else {}
        self.queue = RequestQueue(limits.waiting)
        self.catalogue = None if self.lm.lens is None else Catalogue(self.lm.lens)
        self.jobs: Recent[Job] = Recent("audit", limits.answers)

    def refresh(self) -> None:
        """Reload the names of the prototypes if they changed; StaleLensError for another lens."""
        if self.catalogue is not None:
            self.catalogue = self.catalogue.current()

    def trace(self, key: str) -> Trace:
        """Return the trace of an answer; InputError if it is unknown, unfinished or too long."""
        answers, generation = self.server.answers, self.server.unfinished.get(key)
        if key not in answers and generation is not None and not generation.abandoned:
            raise InputError(f"the answer {key!r} is not finished yet. Ask again in a moment.")
        trace = answers[key].trace
        if len(trace) > self.limits.tokens:
            raise InputError(
                f"the answer {key!r} has {len(trace):,} tokens: the explorer shows "
                f"{self.limits.tokens:,}. Ask for fewer, or use `prismlm explain`."
            )
        return trace

    def tokens(self, source: str | Messages, room: int = 0, limit: int | None = None) -> list[int]:
        """Return the tokens of a text or a chat, or raise InputError if it is empty or too long.

        ``limit``, by default the session's, includes ``room`` for tokens to generate.
        """
        limit = limit or self.limits.tokens
        return self.lm.encode(source, room, limit=limit, reader="the explorer")[0].tolist()

    def streamed(self, job: Job, work: Callable[[SendEvent], None]) -> StreamingResponse:
        """Return the server-sent events of ``work``, which runs when its turn comes; or raise Busy.

        A PrismError ends it with an ``error`` event. When the client disconnects, ``job.stop`` is
        set, which ``work`` should check.
        """
        self.queue.check()
        return StreamingResponse(self._events(job, work), media_type="text/event-stream")

    async def _events(self, job: Job, work: Callable[[SendEvent], None]) -> AsyncIterator[str]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        turn = CancelScope()

        def send(name: str, data: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(events.put_nowait, _event(name, data))

        def run() -> None:
            try:
                with no_panics():
                    work(send)
            except PrismError as error:
                send("error", {"error": str(error)})

        async def wait() -> None:
            with turn:
                await self.queue.run(run)

        task = asyncio.create_task(wait())
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        except Busy:
            yield _event("error", {"error": "busy: others wait for the model already."})
        finally:
            job.stop.set()
            turn.cancel()
            with CancelScope(shield=True):
                await asyncio.wait([task])


def saved(name: str, write: Callable[[Path], object]) -> Response:
    """Return a file for the browser to save, which ``write`` writes; by its extension."""
    with TemporaryDirectory() as directory:
        path = Path(directory, name)
        write(path)
        data = path.read_bytes()
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    kind = guess_type(name)[0] or "application/octet-stream"
    return Response(data, media_type=kind, headers=headers)


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {_encoded(data)}\n\n"


def _encoded(value: Any) -> str:
    return marks_shown(json_text(value, separators=(",", ":")))
