"""prismlm explore and serve: a model in a browser, or behind OpenAI's API, until Ctrl-C."""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import flag, option
from prismlm.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from prismlm.explain.language_model import PrismLM
    from prismlm.web.server import Server

HOST, EXPLORER_PORT, API_PORT = "127.0.0.1", 8321, 8000
ALL_INTERFACES = ("0.0.0.0", "::")
SERVER_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
LOOPBACK = (HOST, "::1", "[::1]", "localhost")
# Seconds for unfinished answers when the server stops.
SHUTDOWN_SECONDS = 3
KEY_HELP = "Requests must bring this key."
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help=KEY_HELP, envvar="PRISMLM_API_KEY")]


def explore(
    model: opt.Model,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    device: opt.Device = "cpu",
    controller: opt.Controller = None,
    port: opt.Port = EXPLORER_PORT,
    host: opt.Host = HOST,
    browser: Annotated[bool, flag("--browser/--no-browser", "Open the page in a browser.")] = True,
) -> None:
    """Ask a model, look at its prototypes and its training text, and steer it, in a browser."""
    opt.require_packages(*SERVER_PACKAGES)
    with closing(_listen(host, port)) as listener:
        lm = opt.open_model(model, lens, corpus, device, controller)
        app, address = _explorer(lm, listener, host)
        typer.echo(f"Explore {lm.path.resolve().name} at {address}\nCtrl-C ends it.", err=True)
        if browser:
            typer.launch(address)
        _run(app, listener)


def _explorer(
    lm: PrismLM, listener: socket.socket, host: str, server: Server | None = None
) -> tuple[FastAPI, str]:
    """Return the explorer as an application, and the address of its page."""
    from prismlm.demo.prompts import PROMPTS, QUESTIONS
    from prismlm.demo.texts import holds_pairs
    from prismlm.explorer import create_app

    cells, port = lm.lens and lm.lens.cells, listener.getsockname()[1]
    hosts = {HOST, "localhost", host}
    if host in ALL_INTERFACES:
        hosts |= {socket.gethostname(), *socket.gethostbyname_ex(socket.gethostname())[2]}
    token = secrets.token_urlsafe(24)
    app = create_app(
        lm,
        token=token,
        hosts=frozenset(f"{_bracketed(name)}:{port}" for name in hosts),
        prompts=PROMPTS,
        questions=QUESTIONS if cells and holds_pairs(cells) else {},
        server=server,
    )
    address = HOST if host in ALL_INTERFACES else _bracketed(host)
    return app, f"http://{address}:{port}/?token={token}"


def serve(
    model: opt.Model,
    lens: opt.Lens = None,
    corpus: opt.CorpusLocation = None,
    device: opt.Device = "cpu",
    controller: opt.Controller = None,
    port: opt.Port = API_PORT,
    host: opt.Host = HOST,
    name: Annotated[str | None, option("NAME", "Default: the name of the directory.")] = None,
    api_key: ApiKey = None,
    batch: Annotated[int, option("N", "Answers generated at the same time.", min=1)] = 8,
    queue: Annotated[int, option("N", "Maximum queue length; then 429.", min=0)] = 64,
    explorer: Annotated[bool, flag("--explorer", "Serve the explorer too.")] = False,
) -> None:
    """Serve a model through OpenAI's API: each answer with the training text behind it."""
    opt.require_packages(*SERVER_PACKAGES)
    from prismlm.explorer.session import Limits
    from prismlm.web import create_app
    from prismlm.web.server import v1

    with closing(_listen(host, port)) as listener:
        lm = opt.open_model(model, lens, corpus, device, controller)
        app = create_app(
            lm,
            name=name,
            api_key=api_key,
            # Without a key, the Host header keeps out DNS rebinding by pages of other sites.
            hosts=LOOPBACK if api_key is None and host in LOOPBACK else None,
            batch_size=batch,
            max_waiting=queue,
            stored_answers=Limits().answers if explorer else 0,
        )
        if api_key is None and host not in LOOPBACK:
            typer.echo("Others can reach this server, and --api-key asks for no key.", err=True)
        address = f"http://{_bracketed(host)}:{listener.getsockname()[1]}/v1"
        typer.echo(f"Serving {app.state.server.name} at {address}", err=True)
        if explorer:
            page, address = _explorer(lm, listener, host, app.state.server)
            app.mount("/v1", v1(app.state.server))  # for errors of routes that it does not have
            app.mount("/", page)
            typer.echo(f"Explore it at {address}", err=True)
        typer.echo("Ctrl-C ends it.", err=True)
        _run(app, listener)


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address, before anything is loaded; InputError if that is impossible."""
    if not host.strip():
        raise InputError("--host is empty: give an address; others can reach 0.0.0.0.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name TCP: without it each token of an answer
    # waits 40 ms for the acknowledgement of the last packet.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise InputError(
            f"cannot serve at {host}, port {port} ({getattr(error, 'strerror', None) or error}): "
            "expected an address of this machine and a free port. --port 0 takes one."
        ) from error
    return listener


def _run(app: Any, listener: socket.socket) -> None:
    import uvicorn

    settings: dict[str, Any] = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, **settings, timeout_graceful_shutdown=SHUTDOWN_SECONDS)
    # Errors have been logged; others are of requests that Ctrl-C cuts off.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.exc_info)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
