"""Access control of the explorer: checks on every request before it is handled.

A page of another site can make a browser send requests to 127.0.0.1, and on a shared machine
others can reach the port. So every request needs the token of this run, as a bearer token, or a
session cookie, which the address that opens the page exchanges its token for.
"""

from __future__ import annotations

import hmac
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prismlm.errors import FormatError, no_panics
from prismlm.web.server import body_refusal

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
    """ASGI middleware: checks Host, Origin, token and body size of every request."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: frozenset[str], max_body: int) -> None:
        self.app, self.token, self.hosts, self.max_body = app, token, hosts, max_body
        # The cookie does not contain the token, so it cannot open another session.
        self._session = secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request or pass it on."""
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
                app = self._refusal(Request(scope)) or self.app
                await app(scope, receive, send_with_headers)
        except FormatError as error:
            await _refused(409, str(error))(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return _refused(421, f"this server is not {host!r}: open the address it printed.")
        if origin is not None and origin != f"http://{host}":
            return _refused(403, "a page of another site may not ask this server.")
        # Cookies ignore the port: two explorers on one machine need different names.
        name, token = f"prismlm-{request.scope['server'][1]}", request.query_params.get("token")
        if token is not None and (request.method, request.url.path) == ("GET", "/"):
            if not _equal(token, self.token):
                return _refused(
                    401, "this key is of another run: open the address that was printed."
                )
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(name, self._session, httponly=True, samesite="strict")
            return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        valid = scheme.lower() == "bearer" and _equal(bearer.strip(), self.token)
        if not valid and not _equal(request.cookies.get(name, ""), self._session):
            return _refused(
                401, "open the address that `prismlm explore` printed: it holds the key."
            )
        refused = body_refusal(headers, self.max_body)
        return refused and _refused(*refused)


def _equal(value: str, expected: str) -> bool:
    return hmac.compare_digest(value.encode(), expected.encode())


def _refused(status: int, message: str) -> Response:
    if status == 401:
        return PlainTextResponse(message + "\n", status_code=status)
    return JSONResponse({"error": message}, status_code=status)
