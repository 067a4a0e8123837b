"""prismlm inspect themes: are a model's units about one thing each?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from prismlm.cli.format import count
from prismlm.cli.inspect.corpus_to_read import CorpusToRead, open_both
from prismlm.cli.label import ModelThere, Url
from prismlm.cli.options import Json, Lens, Model, Split, choice, load_with_lens, number
from prismlm.cli.output import bar, console_for_reading, fit, plain, print_json, table_of
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.corpus.store import Split as SplitName
    from prismlm.instruments.themes.report import ThemeReport
    from prismlm.labels.themes import EndpointJudge

KINDS = ("prototypes", "channels", "heads")
ANSWERS = ".themes.answers.jsonl"
SHOWN = 40
BAR = 16
THEME_WIDTH, NAME_WIDTH = 48, 22


def themes(
    model: Model,
    of: Annotated[
        str, choice("UNITS", "prototypes of a lens, channels of mixers, or attention heads.", KINDS)
    ] = "prototypes",
    lens: Lens = None,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    tokens: Annotated[int, number("N", "Tokens to read for channels and heads; 0 for all.")] = (
        100_000
    ),
    layer: Annotated[int | None, number("N", "Only this layer's channels or heads.")] = None,
    units: Annotated[int, number("N", "Units, drawn by seed.", 1)] = 100,
    seed: Annotated[int, number("S", "Of the units and of random sequences.")] = 0,
    endpoint: Url = None,
    endpoint_model: ModelThere = None,
    as_json: Json = False,
) -> None:
    """Show the themes of a model's units, from the ten sequences that activate each most.

    For each unit: its main theme, how well that is disentangled from others, how many of the ten
    sequences hold it, and how many themes there are; beside ten random sequences. Words alone say
    so, or with --endpoint a language model.
    """
    if of == "prototypes" and (corpus is not None or layer is not None):
        raise InputError("--corpus and --layer are for channels and heads: a lens has its text.")
    if of != "prototypes" and lens is not None:
        raise InputError("--lens is for prototypes: channels and heads are read from --corpus.")
    judge = _judge(endpoint, endpoint_model, model)
    report = read_report(
        model,
        of,
        lens=lens,
        corpus=corpus,
        split=split,
        tokens=tokens,
        layer=layer,
        units=units,
        seed=seed,
        judge=judge,
    )
    told = None if judge is None else judge.session.asked()
    if as_json:
        print_json({**report.to_dict(), "asked": told})
        return
    print_themes(report)
    if told is not None:
        typer.echo(
            f"{told['requests']:,} answers, {told['tokens_in']:,} tokens in, "
            f"{told['tokens_out']:,} out; {sum(told['failures'].values()):,} without an answer"
        )


def _judge(url: str | None, name: str | None, model: Path) -> EndpointJudge | None:
    if (url is None) != (name is None):
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    if url is None or name is None:
        return None
    from prismlm.labels.endpoint import Endpoint
    from prismlm.labels.themes import EndpointJudge

    if not model.is_dir():
        raise InputError(f"there is no model directory {model}.")
    return EndpointJudge(Endpoint(url, name), model / ANSWERS, _announce)


def _announce(questions: int, characters: int) -> None:
    typer.echo(
        f"{questions:,} questions of {count(characters)} characters in all, some four to a token; "
        f"answers are kept in the model's {ANSWERS}.",
        err=True,
    )


def read_report(
    path: Path,
    of: str,
    *,
    lens: str | None = None,
    corpus: Path | None = None,
    split: str = "heldout",
    tokens: int = 100_000,
    layer: int | None = None,
    units: int = 100,
    seed: int = 0,
    judge: EndpointJudge | None = None,
) -> ThemeReport:
    """Return the themes of a model's units, as the command has them."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.themes.report import Kind, theme_report
    from prismlm.instruments.themes.units import channels_or_heads, prototypes

    given: dict[str, Any] = {
        "name": path.resolve().name,
        "of": cast("Kind", of),
        "judge": judge,
        "seed": seed,
        "progress": ConsoleReporter(),
    }
    if of == "prototypes":
        lm, opened = load_with_lens(path, lens)
        found = prototypes(opened, lm.head.prototypes, units, seed)
        assert opened.corpus is not None
        return theme_report(
            found, opened.corpus, split=cast("SplitName", opened.meta.split), **given
        )
    model, sequences = open_both(path, corpus, split, tokens, None)
    kind = "channel" if of == "channels" else "head"
    found = channels_or_heads(model, sequences, kind, layer, units, seed)
    return theme_report(found, sequences.corpus, split=sequences.split, **given)


def print_themes(report: ThemeReport) -> None:
    """Print the three figures as bars beside random sequences, then units with their themes."""
    from prismlm.instruments.themes.report import FIGURES

    console = console_for_reading()
    judged = [one for one in report.judged if one is not None]
    head = (
        f"{len(judged):,} {report.of} of {plain(report.model)} on {plain(report.corpus)}, "
        f"{report.split}, judged by {plain(report.judge)}"
    )
    console.print(head, style="bold")
    documents = sum(report.documents) / len(report.documents)
    said = f"The ten sequences of each are of {documents:.1f} documents in the mean."
    console.print(said, style="dim")
    if report.left_out:
        console.print(f"{report.left_out:,} more have fewer than ten sequences.", style="dim")
    for figure in FIGURES:
        one = report.difference(figure)
        own, chance = (report.values(figure, random=flag) for flag in (False, True))
        console.print()
        said = f"{figure}: mean {own.mean():.1f}, of ten random sequences {chance.mean():.1f}"
        if len(own) > 1:
            said += f"; difference {one.value:+.1f} ({one.low:+.1f} to {one.high:+.1f})"
        console.print(said)
        table = table_of("*", report.of, "*", "random", "*")
        counts = [report.histogram(figure, random=flag) for flag in (False, True)]
        for value, pair in enumerate(zip(*counts, strict=True), 1):
            cells = [Text(str(value))]
            for times, every in zip(pair, (own, chance), strict=True):
                cells += [Text(bar(times / len(every), BAR)), Text(str(times), "dim")]
            table.add_row(*cells)
        console.print(table)
    console.print()
    table = table_of("unit", "*dis.", "*cov.", "*themes", "theme")
    rows = zip(report.names, report.judged, strict=True)
    shown = [(name, one) for name, one in rows if one is not None][:SHOWN]
    for name, one in shown:
        figures = (str(getattr(one, figure)) for figure in FIGURES)
        theme = Text(fit(plain(one.theme), THEME_WIDTH))
        table.add_row(fit(name, NAME_WIDTH), *figures, theme)
    console.print(table)
    if len(judged) > len(shown):
        console.print(f"… and {len(judged) - len(shown):,} more: --json has all.", style="dim")
