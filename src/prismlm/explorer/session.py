"""What one explorer holds: the model, those who wait for it, and the last answers."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyio import CancelScope
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from prismlm.corpus.chat import Messages, asked
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError, PrismError, no_panics
from prismlm.explain.audit import Audit
from prismlm.explain.trace import Trace
from prismlm.files import json_text
from prismlm.lens.labels.catalogue import Catalogue
from prismlm.web.answers import Recent
from prismlm.web.line import Busy, Line
from prismlm.web.server import Server

# Tells an event by its name and value; work may call it from its thread.
Tell = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """Bounds of what one request may ask for.

    Attributes:
        body: bytes.
        tokens: of an answer that is shown, with its prompt, and of what is steered.
        audited: characters of all texts of an audit.
        waiting: requests that wait for the model; more are told that it is busy.
        answers: kept for questions about them, the latest; as many audits.
    """

    body: int = 16_000_000
    tokens: int = 2048
    audited: int = 2_000_000
    waiting: int = 8
    answers: int = 32


@dataclass
class Job:
    """What a request is doing: it can be stopped, and an audit asked for its files.

    Attributes:
        id: unguessable.
        stop: set where it is to end.
        audit, rows, summary: of an audit; one row for each text, the summary once it has ended.
    """

    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    stop: threading.Event = field(default_factory=threading.Event)
    audit: Audit | None = None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])


class Prompt(BaseModel):
    """What a model is to go on from: a text, or with ``chat`` what a user asks it."""

    text: str = Field(min_length=1)
    chat: bool = False

    @property
    def put(self) -> str | Messages:
        """What the model is given."""
        return asked(self.text) if self.chat else self.text


class Writing(Prompt):
    """A prompt, and how the model is to go on."""

    generate: int = Field(default=40, ge=0, le=1024)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**53)

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of whatever writes."""
        return self.model_dump(include={"generate", "temperature", "seed"})


class Shown(JSONResponse):
    """JSON in which marks that turn the direction of writing are shown, and turn nothing."""

    def render(self, content: Any) -> bytes:
        """Return the bytes that are sent."""
        return _sent(content).encode()


class Session:
    """A model being explored.

    Attributes:
        server: what writes, and keeps the answers that are asked about.
        lm: its model.
        limits: of requests.
        prompts: to try, by domain.
        questions: to ask a model that has a chat template, by topic; there may be none.
        line: of those who wait for it.
        catalogue: its prototypes to be searched; None without a lens.
        jobs: the last ones but answers.
    """

    def __init__(
        self,
        server: Server,
        limits: Limits,
        prompts: Mapping[str, str],
        questions: Mapping[str, str],
    ) -> None:
        self.server, self.lm, self.limits = server, server.lm, limits
        lm, self.prompts = server.lm, dict(prompts)
        self.questions = dict(questions) if lm.tokenizer.chat_template else {}
        self.line = Line(limits.waiting)
        self.catalogue = None if lm.lens is None else Catalogue(lm.lens)
        self.jobs: Recent[Job] = Recent("audit", limits.answers)

    def look_again(self) -> None:
        """Search the names of the prototypes anew, where they were written meanwhile.

        Raises:
            StaleLensError: the lens is gone, or was built again and so is another one.
        """
        lens = self.lm.lens
        if lens is None:
            return
        before = lens.meta
        lens.check_unchanged()
        if lens.meta is not before:
            self.catalogue = Catalogue(lens)

    def trace(self, key: str) -> Trace:
        """Return the trace of an answer; InputError if there is none, or not yet, or too long."""
        server = self.server
        writing = server.unfinished.get(key)
        if key not in server.answers and writing is not None and not writing.left:
            raise InputError(f"the answer {key!r} is not there to its end yet. Ask in a moment.")
        trace = server.answers[key].trace
        if len(trace) > self.limits.tokens:
            raise InputError(
                f"the answer {key!r} has {len(trace):,} tokens: the explorer shows "
                f"{self.limits.tokens:,}. Ask for fewer, or use `prismlm explain`."
            )
        return trace

    def tokens(
        self, text: str | Messages, room: int, command: str, most: int | None = None
    ) -> list[int]:
        """Return the tokens of a text or a chat; what is refused is told the bound met first.

        Args:
            text: of at least one token.
            room: tokens that are to be written after it.
            command: the one without such a bound.
            most: tokens, with these; by default the session's limit.

        Raises:
            InputError: it has more, or none, or more than the model reads.
        """
        lm, most = self.lm, most or self.limits.tokens
        if most <= (lm.context_length or most):
            lm.check_length(lm.as_text(text), most, "the explorer")
            length = len(lm.tokens_of(text))
            if length + room > most:
                wanted = f" and {room:,} are asked for" if room else ""
                raise InputError(
                    f"the text has {length:,} tokens{wanted}: the explorer reads {most:,}. "
                    f"Shorten it, or use `prismlm {command}`."
                )
        return lm.encode(text, room)[0].tolist()

    def streamed(self, job: Job, work: Callable[[Tell], None]) -> StreamingResponse:
        """Return the server-sent events that ``work`` tells, once it is its turn.

        Before it there may be ``waiting``; an error of ours ends it as ``error``. Whoever leaves
        sets ``job.stop``, which ``work`` is to look at.

        Raises:
            Busy: too many wait.
        """
        self.line.check()
        return StreamingResponse(self._events(job, work), media_type="text/event-stream")

    async def _events(self, job: Job, work: Callable[[Tell], None]) -> AsyncIterator[str]:
        loop, told = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def tell(name: str, value: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(told.put_nowait, _event(name, value))

        def run() -> None:
            try:
                with no_panics():
                    work(tell)
            except PrismError as error:
                tell("error", {"error": str(error)})

        if self.line.before:
            yield _event("waiting", {"before": self.line.before})
        task = asyncio.ensure_future(self.line.run(run))
        task.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (event := await told.get()) is not None:
                yield event
            await task
        except Busy:
            yield _event("error", {"error": "busy: others wait for the model already."})
        finally:
            # Whoever left does not read on, or waits no more.
            job.stop.set()
            task.cancel()
            with CancelScope(shield=True):
                await asyncio.wait([task])


def attachment(data: str | bytes, name: str, kind: str) -> Response:
    """Return a file to be saved."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=kind, headers=headers)


def _event(name: str, value: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {_sent(value)}\n\n"


def _sent(value: Any) -> str:
    return marks_shown(json_text(value, separators=(",", ":")))
