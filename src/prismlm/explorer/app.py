"""The explorer as an ASGI application: one model, its JSON API, and the page that uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from prismlm import __version__
from prismlm.errors import InputError, PrismError
from prismlm.explain.language_model import PrismLM
from prismlm.explorer import ask, audit, documents, inside, overview, prototypes, steer
from prismlm.explorer.safety import Safety
from prismlm.explorer.session import Busy, Limits, Session, Shown
from prismlm.pages.frame import ASSETS

# One for the model, one for what is read at the start, and two for short questions.
THREADS = 4
VIEWS = (overview, ask, prototypes, steer, inside, audit, documents)


def create_app(
    lm: PrismLM,
    *,
    token: str,
    hosts: frozenset[str],
    prompts: Mapping[str, str] | None = None,
    questions: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """Return the application that explores a model.

    Args:
        lm: the model, with its head and, if it has one, its lens.
        token: every request must bring it; see :mod:`prismlm.explorer.safety`.
        hosts: values of the Host header that name this server, such as ``127.0.0.1:8080``.
        prompts: to try, by domain; where the lens has none of these domains, those of its corpus.
        questions: to ask, by topic, where the model has a chat template.
        limits: of requests.
    """
    limits = limits or Limits()
    session = Session(lm, limits, prompts or {}, questions or {})
    app = FastAPI(
        title="prismlm explorer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Shown,
        lifespan=lambda app: _warming(lm),
    )
    app.add_middleware(Safety, token=token, hosts=hosts, largest=limits.body)
    for kind in (PrismError, RequestValidationError, HTTPException, Busy):
        app.add_exception_handler(kind, _told)
    for view in VIEWS:
        app.include_router(view.routes(session), prefix="/api")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html")

    app.mount("/static", StaticFiles(directory=ASSETS))
    return app


@asynccontextmanager
async def _warming(lm: PrismLM) -> AsyncIterator[None]:
    """Read the tables that the first question would wait for, while the page is being opened."""
    # One computes at a time in any case: what waits its turn is answered in the order it came.
    to_thread.current_default_thread_limiter().total_tokens = THREADS

    def read() -> None:
        if lm.lens is not None:
            _ = lm.lens.names, lm.lens.categories, lm.lens.cells, lm.lens.corpus, lm.lens.index

    warming = asyncio.ensure_future(run_in_threadpool(read))
    yield
    await asyncio.wait([warming])


def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, PrismError):
        status, why = 422 if isinstance(error, InputError) else 409, str(error)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        status, why = 422, f"{where}: {first['msg']}."
    elif isinstance(error, HTTPException):
        status, why = error.status_code, f"{error.detail}."
    else:
        status = 429
        why = "busy: others are waiting for the model already. Try again in a moment."
    return Shown({"error": why}, status, {"Retry-After": "5"} if status == 429 else None)
