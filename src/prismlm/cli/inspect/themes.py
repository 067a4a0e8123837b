"""prismlm inspect themes: are a model's units about one thing each?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.format import count
from prismlm.cli.inspect.corpus_to_read import Tokens, open_both
from prismlm.cli.options import check_endpoint, load_with_lens, option
from prismlm.cli.output import facts_line, print_json, print_report, say
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.probes.theme_judges import EndpointJudge

ANSWERS = ".themes.answers.jsonl"
SHOWN = 40
Units = Annotated[
    Literal["prototypes", "channels", "heads"],
    option(None, "Prototypes of a lens, channels of mixers, or attention heads."),
]


def themes(
    model: opt.Model,
    of: Units = "prototypes",
    lens: opt.Lens = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 100_000,
    layer: Annotated[int | None, option("N", "Only this layer's units.", least=0)] = None,
    units: Annotated[int, option("N", "Units, drawn by seed.", least=1)] = 100,
    seed: Annotated[int, option("S", "Random seed.", least=0)] = 0,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    as_json: opt.Json = False,
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
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.probes.themes import channels_or_heads, theme_report
    from prismlm.probes.themes import prototypes as prototype_units

    given: dict[str, Any] = {"name": model.resolve().name, "of": of, "judge": judge, "seed": seed}
    given["progress"] = ConsoleReporter()
    if of == "prototypes":
        lm, opened = load_with_lens(model, lens)
        found = prototype_units(opened, lm.head.prototypes, units, seed)
        assert opened.corpus is not None
        given["split"] = opened.meta.split
        report = theme_report(found, opened.corpus, **given)
    else:
        checkpoint, sequences = open_both(model, corpus, split, tokens, None)
        kind = "channel" if of == "channels" else "head"
        found = channels_or_heads(checkpoint, sequences, kind, layer, units, seed)
        report = theme_report(found, sequences.corpus, split=sequences.split, **given)
    asked = None if judge is None else judge.session.asked()
    if as_json:
        print_json({**report.to_dict(), "asked": asked})
        return
    tables = {name: report[name] for name in ("figures", "units")}
    tables["units"] = replace(tables["units"], rows=tables["units"].rows[:SHOWN])
    print_report(replace(report, tables=tables))
    if asked is not None:
        say(facts_line(asked))


def _judge(url: str | None, name: str | None, model: Path) -> EndpointJudge | None:
    if not check_endpoint(url, name):
        return None
    from prismlm.lens.labels.endpoint import Endpoint
    from prismlm.probes.theme_judges import EndpointJudge

    def announce(questions: int, characters: int) -> None:
        typer.echo(
            f"{questions:,} questions of {count(characters)} characters in all, some four to a "
            f"token; answers are kept in the model's {ANSWERS}.",
            err=True,
        )

    if not model.is_dir():
        raise InputError(f"there is no model directory {model}.")
    return EndpointJudge(Endpoint(url or "", name or ""), model / ANSWERS, announce)
