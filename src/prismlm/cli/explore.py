"""prismlm explore: a model, its prototypes and its training text in a browser."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import flag
from prismlm.errors import InputError

PORT = 8321
HOST = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
# Seconds that an answer that is being written may take to end when the server stops.
PATIENCE = 3


def explore(
    model: opt.Model,
    lens: opt.Lens = None,
    corpus: opt.MovedCorpus = None,
    port: opt.Port = PORT,
    host: opt.Host = HOST,
    browser: Annotated[bool, flag("--browser/--no-browser", "Open the page in a browser.")] = True,
) -> None:
    """Ask a model, look at its prototypes and its training text, and steer it, in a browser."""
    with closing(listening(host, port)) as listener:
        serve(model, lens, listener, host, corpus=corpus, browser=browser)


def serve(
    model: Path,
    lens: str | None,
    listener: socket.socket,
    host: str,
    *,
    corpus: Path | None = None,
    browser: bool,
) -> None:
    """Serve the explorer of a model until Ctrl-C."""
    from prismlm.demo.prompts import PROMPTS, QUESTIONS
    from prismlm.demo.texts import holds_pairs
    from prismlm.explain.language_model import load
    from prismlm.explorer import create_app

    lm = load(model, lens=lens, corpus=corpus)
    cells = lm.lens and lm.lens.cells
    port = listener.getsockname()[1]
    names = {HOST, "localhost", host}
    if host in EVERYWHERE:
        names |= {socket.gethostname(), *socket.gethostbyname_ex(socket.gethostname())[2]}
    token = secrets.token_urlsafe(24)
    app = create_app(
        lm,
        token=token,
        hosts=frozenset(f"{bracketed(name)}:{port}" for name in names),
        prompts=PROMPTS,
        questions=QUESTIONS if cells and holds_pairs(cells.documents) else {},
    )
    shown = HOST if host in EVERYWHERE else bracketed(host)
    address = f"http://{shown}:{port}/?token={token}"
    typer.echo(f"Explore {lm.path.resolve().name} at {address}\nCtrl-C ends it.", err=True)
    if browser:
        typer.launch(address)
    run_server(app, listener)


def run_server(app: Any, listener: socket.socket) -> None:
    """Serve an application until Ctrl-C."""
    import uvicorn

    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, **quiet, timeout_graceful_shutdown=PATIENCE)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything is loaded; InputError if it cannot."""
    if not host.strip():
        raise InputError("--host is empty, which would be every address: give one, or 0.0.0.0.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only to sockets that name TCP does asyncio set TCP_NODELAY: without it the kernel holds each
    # answer's body, and each token told, until the last packet is acknowledged, 40 ms later.
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


def bracketed(host: str) -> str:
    """Return a host as addresses have it."""
    return f"[{host}]" if ":" in host else host
