"""Who may ask, from where, and how much: what stands before every request.

A page of another site can make a browser send requests to 127.0.0.1, and on a shared machine
others can reach the port. So every request needs the token of this run, as a bearer token, or a
session: the token in the address that opens the page is exchanged for its cookie.
"""

from __future__ import annotations

import hmac
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prismlm.errors import FormatError, no_panics

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Safety:
    """ASGI middleware: checks Host, Origin, token and size of every request.

    Args:
        app: what it stands before.
        token: of this run.
        hosts: values of the Host header that name this server, such as ``127.0.0.1:8080``.
        largest: bytes of a request's body.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: frozenset[str], largest: int) -> None:
        self.app, self.token, self.hosts, self.largest = app, token, hosts, largest
        # What the cookie holds: whoever reads it there cannot make another session of it.
        self._session = secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what may not pass; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cached = "no-cache" if scope["path"].startswith("/static/") else "no-store"
                MutableHeaders(scope=message).update(HEADERS | {"Cache-Control": cached})
            await send(message)

        try:
            with no_panics():
                answer = self._refusal(Request(scope)) or self.app
                await answer(scope, receive, send_with_headers)
        except FormatError as error:
            await _no(409, str(error))(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return _no(421, f"this server is not {host!r}: open the address it printed.")
        if origin is not None and origin != f"http://{host}":
            return _no(403, "a page of another site may not ask this server.")
        # Cookies know no ports: two explorers of one machine must not throw each other out.
        name, given = f"prismlm-{request.scope['server'][1]}", request.query_params.get("token")
        if given is not None and (request.method, request.url.path) == ("GET", "/"):
            if not _equal(given, self.token):
                return _no(401, "this key is of another run: open the address that was printed.")
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(name, self._session, httponly=True, samesite="strict")
            return response
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        known = kind.lower() == "bearer" and _equal(bearer.strip(), self.token)
        if not known and not _equal(request.cookies.get(name, ""), self._session):
            return _no(401, "open the address that `prismlm explore` printed: it holds the key.")
        length = headers.get("content-length", "0")
        # The server holds a body to its Content-Length, but a chunked one to nothing.
        if not length.isdecimal() or "transfer-encoding" in headers:
            return _no(411, "expected a Content-Length.")
        if int(length) > self.largest:
            return _no(413, f"{int(length):,} bytes: at most {self.largest:,} are read at once.")
        return None


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _no(status: int, why: str) -> Response:
    if status == 401:
        return PlainTextResponse(why + "\n", status_code=status)
    return JSONResponse({"error": why}, status_code=status)
