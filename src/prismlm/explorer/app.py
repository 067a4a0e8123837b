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
from prismlm.explorer.session import Limits, PageJSON, Session
from prismlm.pages.frame import ASSETS
from prismlm.web.engine import Busy
from prismlm.web.server import Server, running, v1

# One for the model, one for attribution, and three for short requests.
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

    Its page generates through OpenAI's routes, here under ``/api/v1``, and then asks about the
    answer by its id.

    Args:
        lm: the model, with its head and, if it has one, its lens.
        token: every request must have it; see :mod:`prismlm.explorer.safety`.
        hosts: accepted Host headers, such as ``127.0.0.1:8080``.
        prompts: examples by domain; if the lens has none of these domains, the corpus's own text.
        questions: examples by topic, if the model has a chat template.
        limits: of requests.
        server: of this model, if this application is mounted in it; by default a new one.
    """
    limits = limits or Limits()
    server = server or Server(lm, max_waiting=limits.waiting, stored_answers=limits.answers)
    session = Session(server, limits, prompts or {}, questions or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Waiting requests are answered in order of arrival.
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        async with running(server):
            yield

    app = FastAPI(
        title="prismlm explorer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=PageJSON,
        lifespan=lifespan,
    )
    app.add_middleware(Safety, token=token, hosts=hosts, max_body=limits.body)
    for kind in (PrismError, RequestValidationError, HTTPException, Busy):
        app.add_exception_handler(kind, _error_response)
    for view in VIEWS:
        app.include_router(view.routes(session), prefix="/api")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html")

    app.mount("/api/v1", v1(server))
    app.mount("/static", StaticFiles(directory=ASSETS))
    return app


def _error_response(request: Request, error: Exception) -> Response:
    status, headers = 422, None
    if isinstance(error, PrismError):
        status, message = 422 if isinstance(error, InputError) else 409, str(error)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        message = f"{field}: {first['msg']}."
    elif isinstance(error, HTTPException):
        status, message = error.status_code, f"{error.detail}."
    else:
        status, headers = 429, {"Retry-After": "5"}
        message = "busy: others are waiting for the model already. Try again in a moment."
    return PageJSON({"error": message}, status, headers)
