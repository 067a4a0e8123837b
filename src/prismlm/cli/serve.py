"""prismlm serve: a model behind OpenAI's API, whose answers carry the training text behind them."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.explore import HOST, PATIENCE, Host, listening
from prismlm.cli.options import Lens, Model, MovedCorpus, needs, number, option

if TYPE_CHECKING:
    from fastapi import FastAPI

PORT = 8000
LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")


def serve(
    model: Model,
    lens: Lens = None,
    corpus: MovedCorpus = None,
    port: Annotated[int, number("N", "Port to serve at; 0 takes a free one.", most=65535)] = PORT,
    host: Host = HOST,
    name: Annotated[
        str | None, option("NAME", "The model's name in requests (default: its directory's).")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Requests must bring this key.", envvar="PRISMLM_API_KEY"),
    ] = None,
    batch: Annotated[int, number("N", "Answers written at the same time.", least=1)] = 8,
    queue: Annotated[int, number("N", "Requests that may wait; more are refused with 429.")] = 64,
) -> None:
    """Serve a model through OpenAI's API: each answer with the training text behind it."""
    needs("fastapi", "prometheus_client", "uvicorn")
    from prismlm.explain.language_model import load
    from prismlm.web import create_app

    with closing(listening(host, port)) as listener:
        lm = load(model, lens=lens, corpus=corpus)
        # A page of another site, whose name points here, has no key.
        hosts = LOOPBACK if api_key is None and host in LOOPBACK else None
        limits = {"together": batch, "waiting": queue}
        app = create_app(lm, name=name, api_key=api_key, hosts=hosts, **limits)
        _run(app, listener, host, api_key)


def _run(app: FastAPI, listener: socket.socket, host: str, api_key: str | None) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    if api_key is None and host not in LOOPBACK:
        typer.echo("Others can reach this server, and --api-key asks them for no key.", err=True)
    shown = f"[{host}]" if ":" in host else host
    name, port = app.state.server.name, listener.getsockname()[1]
    typer.echo(f"Serving {name} at http://{shown}:{port}/v1\nCtrl-C ends it.", err=True)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=PATIENCE
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
