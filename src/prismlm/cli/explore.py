"""prismlm explore: a model, its prototypes and its training text in a browser."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import Lens, Model, number
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.explain.language_model import PrismLM

PORT = 8321
HOST = "127.0.0.1"
# Seconds that an answer that is being written may take to end when the server stops.
PATIENCE = 3

Port = Annotated[int, number("N", "Port to serve at; 0 takes a free one.", most=65535)]
Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address to serve at; others can reach 0.0.0.0.")
]


def explore(
    model: Model,
    lens: Lens = None,
    port: Port = PORT,
    host: Host = HOST,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Ask a model, look at its prototypes and its training text, and steer it, in a browser."""
    from prismlm.demo.prompts import PROMPTS
    from prismlm.explain.language_model import load

    with closing(listening(host, port)) as listener:
        lm = load(model, lens=lens)
        serve(lm, listener, host, fitting(lm, PROMPTS), browser=browser)


def fitting(lm: PrismLM, prompts: Mapping[str, str]) -> dict[str, str]:
    """Return the prompts of domains that the lens has; all where it has none of them."""
    domains = set() if lm.lens is None else set(lm.lens.keys("mass", "domain").names)
    return {domain: text for domain, text in prompts.items() if domain in domains} or dict(prompts)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything is loaded.

    Raises:
        InputError: the port is taken, or the address is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
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


def serve(
    lm: PrismLM,
    listener: socket.socket,
    host: str,
    prompts: Mapping[str, str],
    *,
    browser: bool,
) -> None:
    """Serve the explorer until Ctrl-C."""
    import uvicorn

    from prismlm.explorer import create_app

    port = listener.getsockname()[1]
    names = {host, socket.gethostname()} if host in ("0.0.0.0", "::") else {host}
    hosts = frozenset(f"{_bracketed(name)}:{port}" for name in {*names, "127.0.0.1", "localhost"})
    token = secrets.token_urlsafe(24)
    app = create_app(lm, token=token, hosts=hosts, prompts=prompts)
    shown = "127.0.0.1" if host == "0.0.0.0" else _bracketed(host)
    address = f"http://{shown}:{port}/?token={token}"
    typer.echo(f"Explore {Path(lm.path).name} at {address}\nCtrl-C ends it.")
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=PATIENCE
    )
    if browser:
        typer.launch(address)
    uvicorn.Server(config).run(sockets=[listener])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
