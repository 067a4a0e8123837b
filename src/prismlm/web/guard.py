"""What stands before every route: access checks, and errors as JSON in OpenAI's form."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Collection
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prismlm import __version__
from prismlm.errors import FormatError, InputError, PrismError, no_panics, shown
from prismlm.files import json_text
from prismlm.web.engine import Busy
from prismlm.web.protocol import RequestError

log = logging.getLogger(__name__)
# More than the texts that models read in one piece have, and the largest audit of the explorer.
MAX_BODY_BYTES = 16 * 2**20


class StrictJSON(JSONResponse):
    """JSON without NaN."""

    def render(self, content: Any) -> bytes:
        """Return the encoded body."""
        return json_text(content, separators=(",", ":")).encode()


def application(
    answer: Callable[[Exception], Response],
    check: Callable[[Request], Response | None] = lambda _: None,
    on_response: Callable[[Scope, Message], object] = lambda *_: None,
    **options: Any,
) -> FastAPI:
    """Return an application that refuses requests, and answers whatever its routes raise.

    Args:
        answer: returns the response to an error.
        check: returns a response of its own, or None to pass a request on; raises RequestError.
        on_response: called with the scope and the first message of every response.
        options: of FastAPI.
    """

    def guard(inner: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            started, received = False, 0

            async def read() -> Message:
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                if received > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
                return message

            async def respond(message: Message) -> None:
                nonlocal started
                if message["type"] == "http.response.start":
                    started = True
                    on_response(scope, message)
                await send(message)

            try:
                with no_panics():
                    await (check(Request(scope)) or inner)(scope, read, respond)
            except Exception as error:
                if started or not isinstance(error, (RequestError, PrismError, Busy)):
                    log.exception("a request failed")
                if started:
                    raise
                # Raised further, it would close a connection that a client may reuse.
                await answer(error)(scope, receive, respond)

        return guarded

    app = FastAPI(version=__version__, docs_url=None, redoc_url=None, **options)
    app.add_middleware(guard)
    for kind in (RequestValidationError, HTTPException):  # which FastAPI would answer by itself
        app.add_exception_handler(kind, lambda _, error: answer(error))
    return app


def check_request(request: Request, hosts: Collection[str] | None, api_key: str | None) -> None:
    """Raise RequestError for another host, a wrong API key, or a body that is not to be read."""
    host = request.headers.get("host", "")
    if hosts is not None and re.sub(r":\d*$", "", host).lower() not in hosts:
        raise RequestError(f"this server is not {shown(host)}.", 421)
    # In a mounted application, the path begins with the mount point.
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if api_key is not None and path.startswith("/v1") and not has_key(request, api_key):
        message = "the API key is missing or wrong: expected Authorization: Bearer KEY."
        raise RequestError(message, 401, code="invalid_api_key")
    check_body(request)


def has_key(request: Request, key: str) -> bool:
    """Return whether a request has a key as its bearer token."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and equal(value.strip(), key)


def equal(value: str, secret: str) -> bool:
    """Compare in constant time; starlette decodes headers, which are bytes, as Latin-1."""
    return hmac.compare_digest(value.encode("latin-1", "replace"), secret.encode())


def check_body(request: Request) -> None:
    """Raise RequestError for a body that is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can send other types without a preflight request.
    if request.method == "POST" and kind != "application/json":
        raise RequestError(f"expected a body of application/json, got {kind or 'none'}.", 415)


def error_response(error: Exception) -> Response:
    """Return an error in OpenAI's form."""
    status, body = error_body(error)
    return StrictJSON(body, status, {"Retry-After": "1"} if status == 429 else None)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, in OpenAI's form."""
    status, message, param, code = 500, f"{type(error).__name__} in the server.", None, None
    if isinstance(error, RequestError):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, Busy):
        status, code = 429, "queue_full"
        message = "busy: too many requests are waiting for the model. Try again in a moment."
    elif isinstance(error, RequestValidationError):
        places = [".".join(map(str, one["loc"][1:])) for one in error.errors()]
        pairs = zip(places, error.errors(), strict=True)
        message = "; ".join(f"{place or 'the body'}: {one['msg']}" for place, one in pairs)
        status, message, param = 400, f"{message}.", places[0] or None
    elif isinstance(error, HTTPException):
        status, message = error.status_code, f"{error.detail}."
    elif isinstance(error, InputError):
        status, message = 400, str(error)
    elif isinstance(error, FormatError):
        # The lens was rebuilt, or files changed: what is served no longer exists.
        status, message, code = 409, str(error), "stale_lens"
    elif isinstance(error, PrismError):
        message = str(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
