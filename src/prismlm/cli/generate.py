"""prismlm generate: what the model writes after a prompt."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.progress import waiting


def generate(
    model: opt.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text starts with.")],
    chat: opt.Chat = False,
    system: opt.System = None,
    tokens: Annotated[int, opt.option("N", "Tokens to write, at most.", least=0)] = 50,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Print a prompt with what the model writes after it; stops at the end of a document.

    With --chat it is the answer alone. On a terminal, words appear as they are written.
    """
    asked = opt.prompt_of(prompt, chat, system)
    from prismlm.hub import model_directory
    from prismlm.lens.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    with waiting("Opening the model"):
        directory = model_directory(model)
        loaded, tokenizer, sidecar = load_checkpoint(directory)
    # Writing needs no lens, so one that is stale or one of several is no reason to refuse.
    lm = OpenedModel(directory, loaded, tokenizer, sidecar.head, sidecar.logit_map, None)
    how: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "seed": seed}
    left_out = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [left_out]} if left_out else {}
        text = lm.generate(asked, **how)
        output.print_json({"model": str(model), "prompt": prompt, "text": text, **notes})
        return
    if left_out:
        typer.echo(left_out, err=True)
    console = output.console_for_reading()
    if not console.is_terminal:
        typer.echo(lm.generate(asked, **how))
        return
    writer = output.Writer(console)
    if isinstance(asked, str):
        writer.write(asked)
    lm.generate(asked, **how, on_text=writer.write)
    writer.end()
