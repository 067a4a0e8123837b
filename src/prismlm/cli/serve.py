"""prismlm serve: a model behind OpenAI's API, whose answers carry the training text behind them."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from prismlm.cli import options as opt
from prismlm.cli.explore import HOST, bracketed, listening, run_server
from prismlm.cli.options import needs, option

PORT = 8000
LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Requests must bring this key.", envvar="PRISMLM_API_KEY"),
]


def serve(
    model: opt.Model,
    lens: opt.Lens = None,
    corpus: opt.MovedCorpus = None,
    port: opt.Port = PORT,
    host: opt.Host = HOST,
    name: Annotated[str | None, option("NAME", "Of the model (default: its directory's).")] = None,
    api_key: ApiKey = None,
    batch: Annotated[int, option("N", "Answers written at the same time.", least=1)] = 8,
    queue: Annotated[int, option("N", "Requests that may wait; others get 429.", least=0)] = 64,
) -> None:
    """Serve a model through OpenAI's API: each answer with the training text behind it."""
    needs("fastapi", "prometheus_client", "uvicorn")
    from prismlm.explain.language_model import load
    from prismlm.web import create_app

    with closing(listening(host, port)) as listener:
        lm = load(model, lens=lens, corpus=corpus)
        # A page of another site, whose name points here, has no key.
        hosts = LOOPBACK if api_key is None and host in LOOPBACK else None
        app = create_app(lm, name=name, api_key=api_key, hosts=hosts, together=batch, waiting=queue)
        if api_key is None and host not in LOOPBACK:
            typer.echo("Others can reach this server, and --api-key asks for no key.", err=True)
        address = f"http://{bracketed(host)}:{listener.getsockname()[1]}/v1"
        typer.echo(f"Serving {app.state.server.name} at {address}\nCtrl-C ends it.", err=True)
        run_server(app, listener)
