"""prismlm generate: continue a text, or answer a chat message, without opening a lens."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.progress import waiting


def generate(
    model: opt.Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue; with --chat, to answer.")
    ],
    chat: opt.Chat = False,
    system: opt.System = None,
    tokens: Annotated[int, opt.option("N", "Tokens to write, at most.", least=0)] = 50,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Continue a prompt, and print both.

    The model stops at the end of a document. With --chat, only its answer is printed. On
    a terminal, words appear as they are written.
    """
    model_input = opt.prompt_of(prompt, chat, system)
    from prismlm.hub import model_directory
    from prismlm.lens.opened_model import OpenedModel, settings_not_applied
    from prismlm.models.checkpoint import load_checkpoint

    with waiting("Opening the model"):
        directory = model_directory(model)
        loaded, tokenizer, sidecar = load_checkpoint(directory)
    # Not prismlm.load: it refuses a model with a stale lens or several, and none is needed here.
    lm = OpenedModel(directory, loaded, tokenizer, sidecar.head, sidecar.logit_map, lens=None)
    write = partial(lm.generate, model_input, tokens=tokens, temperature=temperature, seed=seed)
    note = settings_not_applied(loaded, temperature)
    if as_json:
        notes = {"notes": [note]} if note else {}
        output.print_json({"model": str(model), "prompt": prompt, "text": write(), **notes})
        return
    if note:
        typer.echo(note, err=True)
    console = output.console_for_reading()
    if not console.is_terminal:
        typer.echo(write())
        return
    writer = output.Writer(console)
    if isinstance(model_input, str):
        writer.write(model_input)
    try:
        write(on_text=writer.write)
    finally:
        # An error message must not follow the prompt on its line.
        writer.end()
