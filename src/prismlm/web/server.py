"""The server: OpenAI's routes over one model, and what each answer relies on."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prismlm import __version__
from prismlm.corpus.chat import Messages
from prismlm.errors import FormatError, InputError, PrismError, no_panics, shown
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.explorer.session import Busy, Line
from prismlm.files import json_text
from prismlm.web.engine import Engine
from prismlm.web.metrics import Metrics
from prismlm.web.protocol import (
    AttributionRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
    Shape,
    Shares,
    ToWrite,
    annotations,
    answered,
    messages_of,
    prismlm_object,
    prompt_of,
    usage_of,
)
from prismlm.web.writing import Choice, Writing

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
        lm: the model, with its lens.
        name: of the model, in requests.
        together: answers that are written at the same time.
        waiting: requests that may wait for their turn.
    """

    def __init__(self, lm: PrismLM, name: str, together: int, waiting: int) -> None:
        self.lm, self.name, self._most = lm, name, waiting
        self.engine = Engine(lm, together, waiting)
        self.metrics = Metrics(self.engine)
        # One attribution at a time; what was written gets one in any case.
        self._attributions = Line(waiting=2 * (together + waiting))
        self._began = int(time.time())

    # -- models

    def model(self) -> dict[str, Any]:
        """Return the entry of the model in ``/v1/models``."""
        about = {"id": self.name, "object": "model", "created": self._began}
        return about | {"owned_by": "prismlm"}

    def check_model(self, name: str) -> None:
        """Raise RequestError for the name of another model."""
        if name != self.name:
            raise RequestError(
                f"the model {shown(name)} does not exist: this server has {self.name!r}.",
                404,
                param="model",
                code="model_not_found",
            )

    # -- writing

    async def write(self, body: ToWrite, text: str | Messages, chat: bool, gone: Gone) -> Response:
        """Answer a request to write."""
        self.engine.check()
        self._check_line()
        shares = body.shares
        writing = await run_in_threadpool(partial(self._prompt, body, text, chat))
        writing = Writing(self.lm, text, *writing)
        self.engine.submit(writing)
        shape, began = Shape(self.name, chat, self.lm.tokenizer), time.monotonic()
        if body.stream:
            events = self._streamed(body, writing, shape, began)
            return StreamingResponse(events, media_type="text/event-stream")
        return Served(await gone.or_result(self._whole(writing, shape, shares, began)))

    def _prompt(self, body: ToWrite, text: str | Messages, chat: bool) -> tuple[Any, Any]:
        """Return the tokens of a prompt [1, T], and how is to be written after it.

        Raises:
            RequestError: too long a prompt.
            InputError: messages, and no chat template or one that refuses them.
            StaleLensError: the lens was built again since it was opened.
        """
        lm, asked = self.lm, body.wanted_tokens
        if body.shares is not None and lm.lens is not None:
            lm.lens.check_unchanged()
        with no_panics():
            longest = lm.context_length or LONGEST
            param = "messages" if chat else "prompt"
            rendered = lm.as_text(text, 1)
            try:
                lm.check_length(rendered, longest)
            except InputError as error:
                raise _too_long(str(error), param) from error
            length = len(lm.tokens_of(text, 1))
            room = max(1, longest - length) if asked is None else asked
            if length + room > longest:
                raise _too_long(
                    f"this model reads {longest:,} tokens, and the request has {length:,} in its "
                    f"{param}" + ("." if asked is None else f" and asks for {asked:,} more."),
                    param,
                )
            return lm.encode(text, room), body.wanted(room)

    async def _whole(
        self, writing: Writing, shape: Shape, shares: Shares | None, began: float
    ) -> dict[str, Any]:
        choices: list[Choice] = []
        try:
            async for written in self._told(writing, began):
                choices += written.choices
            value, cited = await self._attributed(writing, shares)
        finally:
            writing.left = True
        usage = usage_of(writing.prompt.shape[1], len(writing.ids))
        given = choices if writing.wanted.alternatives is not None else None
        framed = shape.whole(writing.words, writing.finish_reason, usage, given, cited)
        return framed if shares is None else framed | {"prismlm": value}

    async def _streamed(
        self, body: ToWrite, writing: Writing, shape: Shape, began: float
    ) -> AsyncIterator[str]:
        try:
            if shape.chat:
                yield _event(shape.chunk("", role="assistant"))
            async for written in self._told(writing, began):
                given = written.choices if writing.wanted.alternatives is not None else None
                if written.text or given:
                    yield _event(shape.chunk(written.text, choices=given))
            value, cited = await self._attributed(writing, body.shares)
            noted = {"annotations": cited} if body.shares is not None else {}
            last = shape.chunk(reason=writing.finish_reason, **noted)
            yield _event(last if body.shares is None else last | {"prismlm": value})
            if body.wants_usage:
                usage = usage_of(writing.prompt.shape[1], len(writing.ids))
                yield _event(shape.last(usage))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the headers are gone: OpenAI's clients read it from the stream
            yield _event(_error(error)[1])
        finally:
            writing.left = True

    async def _told(self, writing: Writing, began: float) -> AsyncIterator[Any]:
        first = True
        while (written := await writing.told.get()) is not None:
            if written.error is not None:
                raise written.error
            if first:
                self.metrics.first_token.observe(time.monotonic() - began)
                first = False
            yield written
        self.metrics.whole.observe(time.monotonic() - began)
        self.metrics.tokens.labels("prompt").inc(writing.prompt.shape[1])
        self.metrics.tokens.labels("completion").inc(len(writing.ids))

    # -- what an answer relies on

    async def _attributed(
        self, writing: Writing, shares: Shares | None
    ) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Return the ``prismlm`` object and the annotations of what was written."""
        if shares is None:
            return None, []

        def work() -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
            trace = writing.trace()
            if trace is None:
                return None, []
            return prismlm_object(trace, shares), annotations(trace, writing.words)

        return await self._timed(work)

    def _check_line(self) -> None:
        """Raise Busy where as many answers wait to be attributed as requests may wait."""
        if self._attributions.waiting > self._most:
            raise Busy

    async def _timed(self, work: Callable[[], T]) -> T:
        began = time.monotonic()
        found = await self._attributions.run(work)
        self.metrics.attribution.observe(time.monotonic() - began)
        return found

    async def attribute(self, body: AttributionRequest) -> dict[str, Any]:
        """Answer ``/v1/attributions``."""
        self._check_line()
        asked, whole, answer = answered(body)
        shares = body.shares or Shares()

        def work() -> dict[str, Any]:
            trace = self._read(asked, whole)
            cited, value = annotations(trace, answer), prismlm_object(trace, shares)
            tokens = usage_of(trace.first + 1 if trace.first else 0, len(trace.answer_ids))
            about = {"object": "attribution", "model": self.name, "annotations": cited}
            return about | {"usage": tokens, "prismlm": value}

        return await self._timed(work)

    def _read(self, asked: str | Messages, whole: str | Messages) -> Trace:
        """Return the trace of an answer, to messages or a prompt, that anybody wrote."""
        lens = self.lm.lens_for("training text to point to")
        lens.check_unchanged()
        trace = self.lm.explain(whole)
        if isinstance(asked, str) and asked:
            read = [step.token_id for step in trace.steps]
            both = zip(self.lm.tokens_of(asked), read, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            trace = replace(trace, first=max(0, same - 1))
        return trace


class Gone:
    """Notices that the client of a request has gone."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def _wait(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    async def or_result(self, work: Awaitable[T]) -> T:
        """Return what ``work`` returns; it is cancelled where the client goes first."""
        working, going = asyncio.ensure_future(work), asyncio.ensure_future(self._wait())
        try:
            await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RequestError("the client has gone.", 499)
            return working.result()
        finally:
            for task in (working, going):
                task.cancel()


class Door:
    """ASGI middleware: checks key, kind and size of every request, and counts it."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, metrics: Metrics) -> None:
        self.app, self._key, self._metrics = app, api_key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        error = self._refusal(scope)
        if error is None:
            await self.app(scope, receive, counted)
        else:
            await _refused(None, error)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"].startswith("/v1"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            known = hmac.compare_digest(given.strip().encode(), self._key.encode())
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
    together: int = 8,
    waiting: int = 64,
) -> FastAPI:
    """Return the application that serves a model.

    Args:
        lm: the model, with a lens.
        name: of the model in requests; otherwise that of its directory.
        api_key: that requests to ``/v1`` must bring as a bearer token; None asks for none.
        together: answers that are written at the same time.
        waiting: requests that may wait for their turn; more are refused with 429.

    Raises:
        InputError: the model has no lens.
    """
    lm.lens_for("training text to point to")
    server = Server(lm, name or lm.path.resolve().name, together, waiting)
    app = FastAPI(
        title="prismlm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Served,
        lifespan=lambda app: _running(server),
    )
    app.state.server = server
    app.add_middleware(Door, api_key=api_key, metrics=server.metrics)
    for kind in (RequestError, PrismError, Busy, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda request, error: _refused(request, error))
    _routes(app, server)
    return app


def _routes(app: FastAPI, server: Server) -> None:
    anything = dict[str, Any]

    @app.get("/v1/models", summary="The one model", response_model=anything)
    def models() -> Response:
        return Served({"object": "list", "data": [server.model()]})

    @app.get("/v1/models/{name:path}", summary="A model by its name", response_model=anything)
    def model(name: str) -> Response:
        server.check_model(name)
        return Served(server.model())

    @app.post("/v1/chat/completions", summary="Answer a chat", response_model=anything)
    async def chat(body: ChatRequest, request: Request) -> Response:
        server.check_model(body.model)
        body.check()
        return await server.write(body, messages_of(body.messages), True, Gone(request))

    @app.post("/v1/completions", summary="Write after a prompt", response_model=anything)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        body.check()
        return await server.write(body, prompt_of(body.prompt), False, Gone(request))

    @app.post("/v1/attributions", summary="What an answer relies on", response_model=anything)
    async def attributions(body: AttributionRequest) -> Response:
        server.check_model(body.model)
        return Served(await server.attribute(body))

    @app.get("/health", summary="Whether it serves", response_model=anything)
    def health() -> Response:
        if not server.engine.alive:
            raise RequestError("the thread that writes has ended: start the server again.", 503)
        assert server.lm.lens is not None
        server.lm.lens.check_unchanged()
        return Served({"status": "ok", "model": server.name})

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@asynccontextmanager
async def _running(server: Server) -> AsyncIterator[None]:
    """Read the tables that the first answer would wait for; end the engine at the end."""
    lens = server.lm.lens
    assert lens is not None

    def read() -> None:
        _ = lens.names, lens.categories, lens.cells, lens.corpus, lens.index, lens.telling

    warming = asyncio.ensure_future(run_in_threadpool(read))
    yield
    await asyncio.wait([warming])
    await run_in_threadpool(server.engine.close)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json_text(value, separators=(',', ':'))}\n\n"


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")


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
