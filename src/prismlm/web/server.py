"""The server: OpenAI's routes over one model, with the sources of each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import prometheus_client as prometheus
from anyio import CancelScope
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Scope
from torch import Tensor

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.errors import InputError, no_panics, shown
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.files import json_text
from prismlm.lens.opened_model import TooLongError
from prismlm.web import protocol
from prismlm.web.engine import Busy, Engine, RequestQueue
from prismlm.web.generation import Chunk, Generation, Sampling, TokenLogProbs
from prismlm.web.guard import (
    StrictJSON,
    application,
    check_request,
    error_body,
    error_response,
)
from prismlm.web.protocol import RequestError, Shares

T = TypeVar("T")
# Tokens of a text, for models without a limit.
DEFAULT_CONTEXT_LENGTH = 8192
OPTIONS: dict[str, Any] = {"title": "prismlm", "default_response_class": StrictJSON}
BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


@dataclass(frozen=True)
class Answer:
    """An answer that the model generated, or that a client sent for attribution.

    ``prompt`` is the text or the messages before it, empty if only a text was sent.
    """

    prompt: str | Messages
    text: str
    trace: Trace

    @property
    def messages(self) -> Messages:
        """The chat up to the answer, for a follow-up question; empty if the prompt is a text."""
        if isinstance(self.prompt, str):
            return []
        before, text = [*self.prompt], self.text
        if before and before[-1]["role"] == ASSISTANT:  # the model continued it
            text = before.pop()["content"] + text
        return [*before, {"role": ASSISTANT, "content": text}]


class Recent(dict[str, T]):
    """The last ``limit`` values by id; errors call them ``noun``, such as "answer"."""

    def __init__(self, noun: str, limit: int) -> None:
        super().__init__()
        self._noun, self._limit = noun, limit

    def add(self, key: str, value: T) -> None:
        """Store a value; drop the oldest beyond the limit."""
        self[key] = value
        while len(self) > self._limit:
            del self[next(iter(self))]

    def __missing__(self, key: str) -> T:
        raise InputError(
            f"there is no {self._noun} {key!r}: the last {self._limit} are kept. Ask again."
        )


class Metrics:
    """Prometheus metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=registry)
        seconds = partial(prometheus.Histogram, registry=registry, buckets=BUCKETS_SECONDS)
        self.requests = counter("prismlm_requests", "Requests answered.", ["path", "status"])
        self.tokens = counter("prismlm_tokens", "Tokens of requests.", ["kind"])
        self.first_token = seconds("prismlm_first_token_seconds", "Time to first token.")
        self.answer = seconds("prismlm_answer_seconds", "Time to the end of an answer.")
        self.attribution = seconds("prismlm_attribution_seconds", "Time to attribute an answer.")
        for name in ("waiting", "running"):
            title, text = f"prismlm_requests_{name}", f"Requests {name}."
            gauge = prometheus.Gauge(title, text, registry=registry)
            gauge.set_function(partial(getattr, engine, name))

    def count(self, scope: Scope, message: Message) -> None:
        """Count a response."""
        path = getattr(scope.get("route"), "path", "other")
        self.requests.labels(path, str(message["status"])).inc()


class Server:
    """One model behind OpenAI's routes, as of :func:`create_app`, but possibly without a lens.

    Attributes:
        answers: the last finished answers by response id.
        unfinished: running generations by response id.
    """

    def __init__(
        self,
        lm: PrismLM,
        name: str | None = None,
        *,
        batch_size: int = 8,
        max_waiting: int = 64,
        stored_answers: int = 0,
    ) -> None:
        self.lm, self._max_waiting = lm, max_waiting
        self.name = name or lm.path.resolve().name
        self.answers: Recent[Answer] = Recent("answer", stored_answers)
        self.unfinished: WeakValueDictionary[str, Generation] = WeakValueDictionary()
        self.engine = Engine(lm, batch_size, max_waiting)
        self._longest_token = max(map(len, lm.tokenizer.get_vocab()))
        self.metrics = Metrics(self.engine)
        # One attribution at a time; every generated answer gets one.
        self._attributions = RequestQueue(2 * (batch_size + max_waiting))
        self.started = int(time.time())

    async def generate(self, body: protocol.WritingRequest, request: Request) -> Response:
        """Answer a request to continue a prompt or a chat."""
        self._check(body)
        start = time.monotonic()
        prompt, sampling = await run_in_threadpool(self._prepare, body)
        generation = Generation(self.lm, body.source, prompt, sampling, started=start)
        self.engine.submit(generation)
        chat = isinstance(body, protocol.ChatRequest)
        form = protocol.ResponseFormat(self.name, chat, self.lm.tokenizer)
        self.unfinished[form.id] = generation
        if body.stream:
            events = self._stream(generation, form, body)
            return StreamingResponse(events, media_type="text/event-stream")
        response = self._respond(generation, form, body.shares)
        return StrictJSON(await _unless_disconnected(request, response))

    def check_lens(self) -> None:
        """Raise StaleLensError if the lens was rebuilt since it was opened."""
        if self.lm.lens is not None:
            self.lm.lens.check_unchanged()

    def _check(self, body: protocol.ModelRequest) -> None:
        """Raise RequestError for the name of another model, or Busy."""
        if body.model != self.name:
            message = f"there is no model {shown(body.model)}: this server has {self.name!r}."
            raise RequestError(message, 404, param="model", code="model_not_found")
        self.engine.check()
        if self._attributions.waiting > self._max_waiting:
            raise Busy

    def _prepare(self, body: protocol.WritingRequest) -> tuple[Tensor, Sampling]:
        """Return the tokens of a prompt [1, T], and how to continue it."""
        if body.shares is not None:
            self.check_lens()
        ids, room = self._encoded(body.source, body.token_limit, 1)
        return ids, body.sampling(room, body.alternatives)

    def _encoded(
        self, source: str | Messages, requested: int | None, minimum: int
    ) -> tuple[Tensor, int]:
        """Return the tokens of a text, and how many may follow: as requested, or all that fit."""
        limit = self.lm.context_length or DEFAULT_CONTEXT_LENGTH
        parts = [source] if isinstance(source, str) else [part["content"] for part in source]
        try:
            # Tokenizing millions of characters takes minutes, and gigabytes of memory.
            if max(len(parts), sum(map(len, parts)) / self._longest_token) > limit:
                raise TooLongError(f"the text has more than {limit} tokens: shorten it.")
            with no_panics():
                room = minimum if requested is None else requested
                ids = self.lm.encode(source, room, limit=limit)
        except TooLongError as error:
            param = "prompt" if isinstance(source, str) else "messages"
            code = "context_length_exceeded"
            raise RequestError(str(error), param=param, code=code) from error
        return ids, limit - ids.shape[1] if requested is None else requested

    async def _respond(
        self, generation: Generation, form: protocol.ResponseFormat, shares: Shares | None
    ) -> dict[str, Any]:
        tokens: list[TokenLogProbs] = []
        try:
            async for chunk in self._chunks(generation):
                tokens += chunk.tokens
            sources = await self._sources(generation, shares, form.id)
        finally:
            generation.abandoned = True
        message = {"role": ASSISTANT, "content": generation.text, "refusal": None}
        response = form.response(
            message | {"annotations": sources.pop("annotations", [])},
            generation.finish_reason,
            None if generation.sampling.alternatives is None else tokens,
        )
        return response | _usage(generation) | sources

    async def _stream(
        self,
        generation: Generation,
        form: protocol.ResponseFormat,
        body: protocol.WritingRequest,
    ) -> AsyncIterator[str]:
        response = partial(form.response, chunk=True)
        try:
            if form.chat:
                yield _event(response({"role": ASSISTANT, "content": ""}))
            async for chunk in self._chunks(generation):
                tokens = None if generation.sampling.alternatives is None else chunk.tokens
                if chunk.text or tokens:
                    yield _event(response({"content": chunk.text}, tokens=tokens))
            sources = await self._sources(generation, body.shares, form.id)
            last = {"annotations": sources.pop("annotations")} if sources else {}
            yield _event(response(last, generation.finish_reason) | sources)
            if (body.stream_options or {}).get("include_usage"):
                yield _event(response(None) | _usage(generation))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the headers are sent: OpenAI's clients read it from the stream
            yield _event(error_body(error)[1])
        finally:
            generation.abandoned = True

    async def _chunks(self, generation: Generation) -> AsyncIterator[Chunk]:
        first = True
        while (chunk := await generation.chunks.get()) is not None:
            if chunk.error is not None:
                raise chunk.error
            if first:
                self.metrics.first_token.observe(time.monotonic() - generation.started)
                first = False
            yield chunk
        self.metrics.answer.observe(time.monotonic() - generation.started)
        self.metrics.tokens.labels("prompt").inc(generation.prompt.shape[1])
        self.metrics.tokens.labels("completion").inc(len(generation.ids))

    async def _sources(
        self, generation: Generation, shares: Shares | None, key: str
    ) -> dict[str, Any]:
        """Return the sources of a generated answer, and store it; empty if none are requested."""
        if shares is None or not generation.ids:
            return {} if shares is None else {"annotations": [], "prismlm": None}

        def make() -> Answer:
            return Answer(generation.source, generation.text, generation.trace())

        return (await self._attribute(make, shares, key))[1]

    async def _attribute(
        self, make: Callable[[], Answer], shares: Shares, key: str
    ) -> tuple[Answer, dict[str, Any]]:
        """Make an answer in its turn, store it, and return it with its sources."""

        def work() -> tuple[Answer, dict[str, Any]]:
            answer = make()
            return answer, protocol.sources_of(answer.trace, answer.text, shares)

        start = time.monotonic()
        answer, sources = await self._attributions.run(work)
        self.metrics.attribution.observe(time.monotonic() - start)
        self.answers.add(key, answer)
        return answer, sources

    async def attribute(self, body: protocol.AttributionRequest) -> dict[str, Any]:
        """Return the sources of an answer, to messages or a prompt, by any model."""
        self._check(body)
        key, (prompt, full, text) = protocol.unique_id("attribution"), protocol.answer_of(body)

        def make() -> Answer:
            self.check_lens()
            self._encoded(full, None, 0)
            trace = self.lm.explain(full)
            if isinstance(prompt, str) and prompt:
                pairs = zip(self.lm.tokens_of(prompt), trace.ids, strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                trace = replace(trace, first=max(0, same - 1), question=prompt)
            return Answer(prompt, text, trace)

        answer, sources = await self._attribute(make, body.shares or Shares(), key)
        trace, entry = answer.trace, {"id": key, "object": "attribution", "model": self.name}
        read = trace.first + 1 if trace.first else 0
        return entry | protocol.usage(read, len(trace.answer_ids)) | sources


def _usage(generation: Generation) -> dict[str, Any]:
    return protocol.usage(generation.prompt.shape[1], len(generation.ids))


def _event(value: dict[str, Any]) -> str:
    return f"data: {json_text(value, separators=(',', ':'))}\n\n"


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled if the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with CancelScope() as scope:
        watching = asyncio.create_task(watch())
        try:
            return await work
        finally:
            watching.cancel()
    raise RequestError("the client has gone.", 499)


def create_app(
    lm: PrismLM,
    *,
    name: str | None = None,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    batch_size: int = 8,
    max_waiting: int = 64,
    stored_answers: int = 0,
) -> FastAPI:
    """Return the application that serves a model.

    Args:
        lm: the model, with a lens.
        name: of the model in requests; by default that of its directory.
        api_key: bearer token that requests to ``/v1`` need; None for no authentication.
        hosts: accepted host names without ports, None for any: a page of another site can have its
            own name resolve to 127.0.0.1, and would then be able to send any request.
        batch_size: answers generated at the same time.
        max_waiting: requests that may wait; others are refused with 429.
        stored_answers: number of recent answers that the explorer can still show.

    Raises:
        InputError: the model has no lens, or the key is empty.
    """
    if api_key is not None and not api_key.strip():
        raise InputError("the API key is empty, which would be none: give one, or leave it out.")
    lm.lens_for("training text to point to")
    server = Server(
        lm, name, batch_size=batch_size, max_waiting=max_waiting, stored_answers=stored_answers
    )
    app = application(
        error_response,
        check=lambda request: check_request(request, hosts, api_key),
        on_response=server.metrics.count,
        lifespan=lambda _: running(server),
        **OPTIONS,
    )
    app.state.server = server
    app.include_router(_routes(server, "/v1"))

    @app.get("/health", summary="Whether it serves", response_model=dict[str, Any])
    def health() -> Response:
        server.check_lens()
        return StrictJSON({"status": "ok", "model": server.name})

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse)
    def metrics() -> Response:
        text = prometheus.generate_latest(server.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    return app


def v1(server: Server) -> FastAPI:
    """Return only OpenAI's routes, to be mounted in an application with its own checks."""
    app = application(error_response, **OPTIONS)
    app.include_router(_routes(server))
    return app


def _routes(server: Server, prefix: str = "") -> APIRouter:
    router, anything = APIRouter(prefix=prefix), dict[str, Any]

    @router.get("/models", summary="The one model", response_model=anything)
    def models() -> Response:
        model = {"id": server.name, "object": "model", "created": server.started}
        return StrictJSON({"object": "list", "data": [model | {"owned_by": "prismlm"}]})

    @router.post("/chat/completions", summary="Answer a chat", response_model=anything)
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        return await server.generate(body, request)

    @router.post("/completions", summary="Write after a prompt", response_model=anything)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        return await server.generate(body, request)

    @router.post("/attributions", summary="What an answer relies on", response_model=anything)
    async def attributions(body: protocol.AttributionRequest) -> Response:
        return StrictJSON(await server.attribute(body))

    return router


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    """Read the tables that the first answer needs; close the engine at the end."""
    lens = server.lm.lens

    def read() -> None:
        if lens is not None:
            _ = lens.names, lens.categories, lens.cells, lens.corpus, lens.index

    warming = asyncio.ensure_future(run_in_threadpool(read))
    yield
    await asyncio.wait([warming])
    await server.engine.close()
