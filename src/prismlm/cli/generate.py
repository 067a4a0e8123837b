"""prismlm generate: what the model writes after a prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from prismlm.cli.options import Chat, Json, Model, SamplingSeed, System, Temperature, number, put
from prismlm.cli.output import print_json


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

    With --chat it is the answer alone.
    """
    asked = put(prompt, chat, system)
    from prismlm.index.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    loaded, tokenizer, sidecar = load_checkpoint(model)
    # Writing needs no lens, so one that is stale or one of several is no reason to refuse.
    lm = OpenedModel(model, loaded, tokenizer, sidecar.head, sidecar.logit_map, None)
    text = lm.generate(asked, tokens=tokens, temperature=temperature, seed=seed)
    left_out = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [left_out]} if left_out else {}
        print_json({"model": str(model), "prompt": prompt, "text": text, **notes})
        return
    if left_out:
        typer.echo(left_out, err=True)
    typer.echo(text)
