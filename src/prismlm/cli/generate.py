"""prismlm generate: what the model writes after a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from prismlm.cli.options import Chat, Json, Model, SamplingSeed, System, Temperature, number, put
from prismlm.cli.output import console_for_reading, print_json
from prismlm.cli.progress import waiting

if TYPE_CHECKING:
    from prismlm.corpus.chat import Messages
    from prismlm.index.opened_model import OpenedModel


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text starts with.")],
    chat: Chat = False,
    system: System = None,
    tokens: Annotated[int, number("N", "Tokens to write, at most.")] = 50,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
    as_json: Json = False,
) -> None:
    """Print a prompt with what the model writes after it; stops at the end of a document.

    With --chat it is the answer alone. On a terminal, words appear as they are written.
    """
    asked = put(prompt, chat, system)
    from prismlm.index.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    with waiting("Opening the model"):
        loaded, tokenizer, sidecar = load_checkpoint(model)
    # Writing needs no lens, so one that is stale or one of several is no reason to refuse.
    lm = OpenedModel(model, loaded, tokenizer, sidecar.head, sidecar.logit_map, None)
    how = {"tokens": tokens, "temperature": temperature, "seed": seed}
    console = console_for_reading()
    if console.is_terminal and not as_json:
        _stream(console, lm, asked, how)
        return
    text = lm.generate(asked, **how)
    left_out = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [left_out]} if left_out else {}
        print_json({"model": str(model), "prompt": prompt, "text": text, **notes})
        return
    if left_out:
        typer.echo(left_out, err=True)
    typer.echo(text)


def _stream(console: Console, lm: OpenedModel, asked: str | Messages, how: dict[str, Any]) -> None:
    """Print what is written while it is."""
    from prismlm.cli.printing.answer import Writer
    from prismlm.index.opened_model import settings_not_applied

    if left_out := settings_not_applied(lm.model, how["temperature"]):
        typer.echo(left_out, err=True)
    writer = Writer(console)
    if isinstance(asked, str):
        writer.write(asked)
    lm.generate(asked, **how, on_text=writer.write)
    writer.end()
