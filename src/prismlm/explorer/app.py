"""The explorer as an ASGI application: one model, its JSON API, and the page that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from prismlm import __version__
from prismlm.errors import InputError, PrismError
from prismlm.explain.language_model import PrismLM
from prismlm.explorer import ask, audit, documents, inside, overview, prototypes, steer
from prismlm.explorer.safety import Safety
from prismlm.explorer.session import Limits, Session, Shown
from prismlm.pages.frame import ASSETS
from prismlm.web.line import Busy
from prismlm.web.server import Server, running, v1

# One for the model, one for what answers rely on, and three for short questions.
THREADS = 5
VIEWS = (overview, ask, prototypes, steer, inside, audit, documents)


def create_app(
    lm: PrismLM,
    *,
    token: str,
    hosts: frozenset[str],
    prompts: Mapping[str, str] | None = None,
    questions: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    server: Server | None = None,
) -> FastAPI:
    """Return the application that explores a model.

    Its page asks the model through OpenAI's routes, here under ``/api/v1``, and then asks about
    the answer by its id.

    Args:
        lm: the model, with its head and, if it has one, its lens.
        token: every request must bring it; see :mod:`prismlm.explorer.safety`.
        hosts: values of the Host header that name this server, such as ``127.0.0.1:8080``.
        prompts: to try, by domain; where the lens has none of these domains, those of its corpus.
        questions: to ask, by topic, where the model has a chat template.
        limits: of requests.
        server: of this model, which others ask too and whose application this one is mounted in;
            None for one of its own.
    """
    limits = limits or Limits()
    own = server or Server(lm, waiting=limits.waiting, kept=limits.answers)
    session = Session(own, limits, prompts or {}, questions or {})
    app = FastAPI(
        title="prismlm explorer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Shown,
        lifespan=lambda app: _running(own),
    )
    app.add_middleware(Safety, token=token, hosts=hosts, largest=limits.body)
    for kind in (PrismError, RequestValidationError, HTTPException, Busy):
        app.add_exception_handler(kind, _told)
    for view in VIEWS:
        app.include_router(view.routes(session), prefix="/api")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html")

    app.mount("/api/v1", v1(own))
    app.mount("/static", StaticFiles(directory=ASSETS))
    return app


@asynccontextmanager
async def _running(server: Server) -> AsyncIterator[None]:
    # What waits its turn is answered in the order it came.
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    async with running(server):
        yield


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
