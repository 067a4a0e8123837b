"""The explorer as an ASGI application: one model, its JSON API, and the page that uses it.

A page of another site can make a browser send requests to 127.0.0.1, and on a shared machine
others can reach the port. So every request needs the token of this run, as a bearer token, or a
session cookie, which the address that opens the page exchanges its token for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope

from prismlm.errors import PrismError
from prismlm.explain.language_model import PrismLM
from prismlm.explorer import ask, audit, inside, lens, overview, steer
from prismlm.explorer.session import Limits, PageJSON, Session
from prismlm.pages.frame import ASSETS
from prismlm.web.guard import application, check_body, equal, error_body, has_key
from prismlm.web.protocol import RequestError
from prismlm.web.server import Server, running, v1

VIEWS = (overview, ask, lens, steer, inside, audit)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


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
        token: every request must have it, or the session cookie.
        hosts: accepted Host headers, such as ``127.0.0.1:8080``.
        prompts: examples by domain; if the lens has none of these domains, the corpus's own text.
        questions: examples by topic, if the model has a chat template.
        limits: of requests.
        server: of this model, if this application is mounted in it; by default a new one.
    """
    limits = limits or Limits()
    server = server or Server(lm, max_waiting=limits.waiting, stored_answers=limits.answers)
    session = Session(server, limits, prompts or {}, questions or {})

    app = application(
        *(_error_response, _access_check(token, hosts), _set_headers),
        lifespan=lambda _: running(server),
        title="prismlm explorer",
        default_response_class=PageJSON,
    )
    for view in VIEWS:
        app.include_router(view.routes(session), prefix="/api")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html")

    app.mount("/api/v1", v1(server))
    app.mount("/static", StaticFiles(directory=ASSETS))
    return app


def _access_check(token: str, hosts: frozenset[str]) -> Callable[[Request], Response | None]:
    """Return the check of Host, Origin, token and body of every request."""
    # The cookie does not contain the token, so it cannot open another session.
    session = secrets.token_urlsafe(24)

    def check(request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in hosts:
            raise RequestError(f"this server is not {host!r}: open the address it printed.", 421)
        if origin is not None and origin != f"http://{host}":
            raise RequestError("a page of another site may not ask this server.", 403)
        # Cookies ignore the port: two explorers on one machine need different names.
        cookie, key = f"prismlm-{request.scope['server'][1]}", request.query_params.get("token")
        if key is not None and (request.method, request.url.path) == ("GET", "/"):
            if not equal(key, token):
                message = "this key is of another run: open the address that was printed."
                raise RequestError(message, 401)
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(cookie, session, httponly=True, samesite="strict")
            return response
        if not has_key(request, token) and not equal(request.cookies.get(cookie, ""), session):
            message = "open the address that `prismlm explore` printed: it holds the key."
            raise RequestError(message, 401)
        check_body(request)
        return None

    return check


def _set_headers(scope: Scope, message: Message) -> None:
    cached = "no-cache" if scope["path"].startswith("/static/") else "no-store"
    MutableHeaders(scope=message).update(HEADERS | {"Cache-Control": cached})


def _error_response(error: Exception) -> Response:
    status, body = error_body(error)
    if status == 500 and isinstance(error, PrismError):
        status = 409  # the model or lens allows no valid result, as for a DecompositionError
    message = body["error"]["message"]
    if status == 401:  # shown in the browser's window
        return PlainTextResponse(message + "\n", status)
    return PageJSON({"error": message}, status, {"Retry-After": "5"} if status == 429 else None)
