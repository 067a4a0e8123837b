"""prismlm inspect themes: are a model's units about one thing each?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prismlm.cli.format import count
from prismlm.cli.inspect.corpus_to_read import CorpusToRead, open_both
from prismlm.cli.label import ModelThere, Url
from prismlm.cli.options import Json, Lens, Model, Split, choice, load_with_lens, number
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.corpus.store import Split as SplitName
    from prismlm.instruments.results import Report
    from prismlm.instruments.theme_judges import EndpointJudge

KINDS = ("prototypes", "channels", "heads")
ANSWERS = ".themes.answers.jsonl"
SHOWN = 40


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
    from prismlm.cli.printing.tables import print_report

    tables = {name: report[name] for name in ("figures", "units")}
    tables["units"] = replace(tables["units"], rows=tables["units"].rows[:SHOWN])
    print_report(replace(report, tables=tables))
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
    from prismlm.instruments.theme_judges import EndpointJudge
    from prismlm.labels.endpoint import Endpoint

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
) -> Report:
    """Return the themes of a model's units, as the command has them."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.themes import Kind, channels_or_heads, prototypes, theme_report

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
