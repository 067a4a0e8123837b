"""The server: OpenAI's routes over one model, and what each answer relies on."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from prismlm import __version__
from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.errors import FormatError, InputError, PrismError, no_panics, shown
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.files import json_text
from prismlm.web.answers import Answer, Recent
from prismlm.web.engine import Engine
from prismlm.web.line import Busy, Line
from prismlm.web.metrics import Metrics
from prismlm.web.protocol import (
    AttributionRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
    Shape,
    Shares,
    ToWrite,
    answered,
    identity,
    messages_of,
    prismlm_object,
    prompt_of,
    url_citations,
    usage_of,
)
from prismlm.web.writing import Choice, Wanted, Writing, Written

log = logging.getLogger(__name__)
T = TypeVar("T")
LARGEST_BODY = 16_000_000
# Tokens of a text, for models without a bound of their own.
LONGEST = 8192


class Served(JSONResponse):
    """JSON as prismlm writes it, without NaN."""

    def render(self, content: Any) -> bytes:
        """Return the bytes that are sent."""
        return json_text(content, separators=(",", ":")).encode()


class Server:
    """One model behind OpenAI's routes.

    Args:
        lm, name, together, waiting, kept: as of :func:`create_app`; here the model may be without
            a lens, and has no sources to point to.

    Attributes:
        answers: the last answers that have ended, by the ids of their responses.
        unfinished: those that are being written, likewise.
    """

    def __init__(
        self,
        lm: PrismLM,
        name: str | None = None,
        *,
        together: int = 8,
        waiting: int = 64,
        kept: int = 0,
    ) -> None:
        self.lm, self._most = lm, waiting
        self.name = name or lm.path.resolve().name
        self.answers: Recent[Answer] = Recent("answer", kept)
        self.unfinished: WeakValueDictionary[str, Writing] = WeakValueDictionary()
        self.engine = Engine(lm, together, waiting)
        engine = self.engine
        self.metrics = Metrics(
            {"waiting": lambda: engine.waiting, "running": lambda: engine.writing}
        )
        # One attribution at a time; what was written gets one in any case.
        self._attributions = Line(waiting=2 * (together + waiting))
        self._began = int(time.time())

    def model(self) -> dict[str, Any]:
        """Return the entry of the model in ``/v1/models``."""
        about = {"id": self.name, "object": "model", "created": self._began}
        return about | {"owned_by": "prismlm"}

    def check_model(self, name: str) -> None:
        """Raise RequestError for the name of another model."""
        if name != self.name:
            message = f"the model {shown(name)} does not exist: this server has {self.name!r}."
            raise RequestError(message, 404, param="model", code="model_not_found")

    async def write(self, body: ToWrite, text: str | Messages, request: Request) -> Response:
        """Answer a request to write after a prompt, or messages."""
        self._check_queues()
        chat, began = not isinstance(text, str), time.monotonic()
        prompt, wanted = await run_in_threadpool(partial(self._prompt, body, text))
        self._check_queues()
        writing = Writing(self.lm, text, prompt, wanted)
        self.engine.submit(writing)
        shape = Shape(self.name, chat, self.lm.tokenizer)
        self.unfinished[shape.id] = writing
        if not body.stream:
            whole = self._whole(writing, shape, body.shares, began)
            return Served(await unless_gone(request, whole))
        events = self._streamed(writing, shape, body, began)
        return StreamingResponse(events, media_type="text/event-stream")

    def check_lens(self) -> None:
        """Raise StaleLensError where the lens was built again since it was opened."""
        if self.lm.lens is not None:
            self.lm.lens.check_unchanged()

    def _check_queues(self) -> None:
        """Raise Busy where as many wait to be written, or attributed, as may."""
        self.engine.check()
        if self._attributions.waiting > self._most:
            raise Busy

    def _prompt(self, body: ToWrite, text: str | Messages) -> tuple[Tensor, Wanted]:
        """Return the tokens of a prompt [1, T], and how is to be written after it.

        Raises:
            RequestError: too long a prompt.
            InputError: messages, and no chat template or one that refuses them.
            StaleLensError: the lens was built again since it was opened.
        """
        if body.shares is not None:
            self.check_lens()
        with no_panics():
            room = self._room(text, body.wanted_tokens, 1)
            return self.lm.encode(text, room), body.wanted(room)

    def _room(self, text: str | Messages, asked: int | None, least: int) -> int:
        """Return how many tokens may follow a text: those asked for, or all that fit.

        Raises:
            RequestError: there is no room for so many, or for the ``least``.
            InputError: as of :meth:`_prompt`.
        """
        lm = self.lm
        longest = lm.context_length or LONGEST
        param = "prompt" if isinstance(text, str) else "messages"
        too_long = partial(RequestError, param=param, code="context_length_exceeded")
        rendered = lm.as_text(text, least)
        try:
            lm.check_length(rendered, longest)
        except InputError as error:
            raise too_long(str(error)) from error
        length = len(lm.tokens_of(text, least))
        room = max(least, longest - length) if asked is None else asked
        if length + room > longest:
            more = "." if asked is None else f" and asks for {asked:,} more."
            has = f"the request has {length:,} in its {param}{more}"
            raise too_long(f"this model reads {longest:,} tokens, and {has}")
        return room

    async def _whole(
        self, writing: Writing, shape: Shape, shares: Shares | None, began: float
    ) -> dict[str, Any]:
        choices: list[Choice] = []
        try:
            async for written in self._told(writing, began):
                choices += written.choices
            cited, value = await self._attributed(writing, shares, shape.id)
        finally:
            writing.left = True
        said = {"role": ASSISTANT, "content": writing.words, "refusal": None, "annotations": cited}
        given = choices if writing.wanted.alternatives is not None else None
        return shape.framed(said, writing.finish_reason, given) | _used(writing) | value

    async def _streamed(
        self, writing: Writing, shape: Shape, body: ToWrite, began: float
    ) -> AsyncIterator[str]:
        framed = partial(shape.framed, chunk=True)
        try:
            if shape.chat:
                yield _event(framed({"role": ASSISTANT, "content": ""}))
            async for written in self._told(writing, began):
                given = written.choices if writing.wanted.alternatives is not None else None
                if written.text or given:
                    yield _event(framed({"content": written.text}, choices=given))
            cited, value = await self._attributed(writing, body.shares, shape.id)
            last = {} if body.shares is None else {"annotations": cited}
            yield _event(framed(last, writing.finish_reason) | value)
            if (body.stream_options or {}).get("include_usage"):
                yield _event(framed(None) | _used(writing))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the headers are gone: OpenAI's clients read it from the stream
            yield _event(_error(error)[1])
        finally:
            writing.left = True

    async def _told(self, writing: Writing, began: float) -> AsyncIterator[Written]:
        observe = self.metrics.first_token.observe
        while (written := await writing.told.get()) is not None:
            if written.error is not None:
                raise written.error
            observe(time.monotonic() - began)
            observe = _ignored
            yield written
        self.metrics.answer.observe(time.monotonic() - began)
        self.metrics.tokens.labels("prompt").inc(writing.prompt.shape[1])
        self.metrics.tokens.labels("completion").inc(len(writing.ids))

    async def _attributed(
        self, writing: Writing, shares: Shares | None, key: str
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the annotations of what was written, and what stands beside the choices."""

        if shares is None:
            return [], {}

        def work() -> tuple[Trace | None, list[dict[str, Any]], dict[str, Any] | None]:
            trace = writing.trace()
            if trace is None or trace.lens is None:
                return trace, [], None
            return trace, url_citations(trace, writing.words), prismlm_object(trace, shares)

        trace, cited, value = await self._timed(work)
        if trace is not None:
            self.answers.add(key, Answer(writing.text, writing.words, trace))
        return cited, {"prismlm": value}

    async def _timed(self, work: Callable[[], T]) -> T:
        began = time.monotonic()
        found = await self._attributions.run(work)
        self.metrics.attribution.observe(time.monotonic() - began)
        return found

    async def attribute(self, body: AttributionRequest) -> dict[str, Any]:
        """Return what an answer, to messages or a prompt, that anybody wrote relies on."""
        self._check_queues()
        key, (asked, whole, answer) = identity("attribution"), answered(body)

        def work() -> tuple[Trace, dict[str, Any]]:
            self.check_lens()
            with no_panics():
                self._room(whole, None, 0)
            trace = self.lm.explain(whole)
            if isinstance(asked, str) and asked:
                read = zip(self.lm.tokens_of(asked), trace.steps, strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, read))
                trace = replace(trace, first=max(0, same - 1), question=asked)
            used = usage_of(trace.first + 1 if trace.first else 0, len(trace.answer_ids))
            about = {"id": key, "object": "attribution", "model": self.name, **used}
            if trace.lens is None:
                return trace, about | {"annotations": [], "prismlm": None}
            about["annotations"] = url_citations(trace, answer)
            return trace, about | {"prismlm": prismlm_object(trace, body.shares or Shares())}

        trace, found = await self._timed(work)
        self.answers.add(key, Answer(asked, answer, trace))
        return found


def _used(writing: Writing) -> dict[str, Any]:
    return usage_of(writing.prompt.shape[1], len(writing.ids))


def _ignored(_: float) -> None:
    pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; it is cancelled where the client goes first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = working, going = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client has gone.", 499)
        return working.result()
    finally:
        working.cancel()
        going.cancel()


class Door:
    """ASGI middleware: checks host, key, kind and size of every request, and counts it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        hosts: Collection[str] | None,
        metrics: Metrics,
    ) -> None:
        self.app, self._key, self._hosts, self._metrics = app, api_key, hosts, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        error: Exception | None = self._refusal(scope)
        if error is None:
            try:
                await self.app(scope, receive, counted)
            except Exception as raised:
                if begun:
                    raise
                # Raised further, it would be answered by a closed connection, which a client
                # may have begun to use again.
                log.exception("a request failed")
                error = raised
        if error is not None:
            await _refused(None, error)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and re.sub(r":\d*$", "", host).lower() not in self._hosts:
            return RequestError(f"this server is not {shown(host)}.", 421)
        # Mounted in another application, the path begins with the place.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._key is not None and path.startswith("/v1"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            # Headers are bytes, which starlette shows as Latin-1.
            known = hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode())
            if kind.lower() != "bearer" or not known:
                message = "the API key is missing or wrong: expected Authorization: Bearer KEY."
                return RequestError(message, 401, code="invalid_api_key")
        if scope["method"] != "POST":
            return None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page of another site can make a browser send other kinds without asking first.
        if kind != "application/json":
            return RequestError(f"expected a body of application/json, got {kind or 'none'}.", 415)
        length = headers.get("content-length", "")
        if not length.isdecimal() or "transfer-encoding" in headers:
            return RequestError("expected a Content-Length.", 411)
        if int(length) > LARGEST_BODY:
            return RequestError(f"{int(length):,} bytes: at most {LARGEST_BODY:,} are read.", 413)
        return None


def create_app(
    lm: PrismLM,
    *,
    name: str | None = None,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    together: int = 8,
    waiting: int = 64,
    kept: int = 0,
) -> FastAPI:
    """Return the application that serves a model.

    Args:
        lm: the model, with a lens.
        name: of the model in requests; otherwise that of its directory.
        api_key: that requests to ``/v1`` must bring as a bearer token; None asks for none.
        hosts: that requests may call this server, without ports; None for any. A page of another
            site can have its own name point to 127.0.0.1, and then ask what it likes.
        together: answers that are written at the same time.
        waiting: requests that may wait for their turn; more are refused with 429.
        kept: answers that the explorer can still show, the last ones.

    Raises:
        InputError: the model has no lens, or the key is empty.
    """
    if api_key is not None and not api_key.strip():
        raise InputError("the API key is empty, which would be none: give one, or leave it out.")
    lm.lens_for("training text to point to")
    server = Server(lm, name, together=together, waiting=waiting, kept=kept)
    app = _application(lifespan=lambda app: running(server))
    app.state.server = server
    app.add_middleware(Door, api_key=api_key, hosts=hosts, metrics=server.metrics)
    _routes(app, server, "/v1")

    @app.get("/health", summary="Whether it serves", response_model=dict[str, Any])
    def health() -> Response:
        if not server.engine.alive:
            raise RequestError("the thread that writes has ended: start the server again.", 503)
        server.check_lens()
        return Served({"status": "ok", "model": server.name})

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def v1(server: Server) -> FastAPI:
    """Return OpenAI's routes alone, to be mounted where something else guards the door."""
    app = _application()
    _routes(app, server, "")
    return app


def _application(**options: Any) -> FastAPI:
    told: dict[str, Any] = {"title": "prismlm", "version": __version__}
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = FastAPI(**told, **pages, default_response_class=Served, **options)
    for kind in (RequestError, PrismError, Busy, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refused)
    return app


def _routes(app: FastAPI, server: Server, place: str) -> None:
    anything = dict[str, Any]

    @app.get(f"{place}/models", summary="The one model", response_model=anything)
    def models() -> Response:
        return Served({"object": "list", "data": [server.model()]})

    one = f"{place}/models/{{name:path}}"

    @app.get(one, summary="A model by its name", response_model=anything)
    def model(name: str) -> Response:
        server.check_model(name)
        return Served(server.model())

    @app.post(f"{place}/chat/completions", summary="Answer a chat", response_model=anything)
    async def chat(body: ChatRequest, request: Request) -> Response:
        server.check_model(body.model)
        body.check()
        return await server.write(body, messages_of(body.messages), request)

    @app.post(f"{place}/completions", summary="Write after a prompt", response_model=anything)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        body.check()
        return await server.write(body, prompt_of(body.prompt), request)

    @app.post(f"{place}/attributions", summary="What an answer relies on", response_model=anything)
    async def attributions(body: AttributionRequest) -> Response:
        server.check_model(body.model)
        return Served(await server.attribute(body))


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    """Read the tables that the first answer would wait for; end the engine at the end."""
    lens = server.lm.lens

    def read() -> None:
        if lens is not None:
            _ = lens.names, lens.categories, lens.cells, lens.corpus, lens.index, lens.mass

    warming = asyncio.ensure_future(run_in_threadpool(read))
    yield
    await asyncio.wait([warming])
    await run_in_threadpool(server.engine.close)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json_text(value, separators=(',', ':'))}\n\n"


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, in OpenAI's form."""
    status, message, param, code = 500, f"{type(error).__name__} in the server.", None, None
    if isinstance(error, RequestError):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, Busy):
        status, code = 429, "queue_full"
        message = "busy: as many requests wait for the model as may. Try again in a moment."
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        status, message = 400, f"{param or 'the request'}: {first['msg']}."
    elif isinstance(error, HTTPException):
        status, message = error.status_code, f"{error.detail}."
    elif isinstance(error, InputError):
        status, message = 400, str(error)
    elif isinstance(error, PrismError):
        # A lens that was built again, or files that changed: what is served is no longer there.
        status, message = (409, str(error)) if isinstance(error, FormatError) else (500, str(error))
        code = "stale_lens" if status == 409 else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _refused(request: Request | None, error: Exception) -> Response:
    status, body = _error(error)
    headers = {"Retry-After": "1"} if status == 429 else None
    return Served(body, status_code=status, headers=headers)
