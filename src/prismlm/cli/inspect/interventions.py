"""prismlm inspect interventions: what a model does without a channel, beside control channels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import Json, Overwrite, flag, option, parse_places
from prismlm.cli.output import print_json
from prismlm.errors import InputError, suggest
from prismlm.files import json_text
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.instruments.channels.case_files import Case
    from prismlm.instruments.channels.concepts import ConceptInModel
    from prismlm.instruments.channels.effect_table import By

BY = ["relative", "points"]
CONTROLS_FROM = ["layer", "model"]
Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", help="Model directories, such as seeds.")
]
CasesFile = Annotated[
    str,
    option(
        "NAME|FILE",
        "covid, men, mental_health, new_zealand or women; or JSON lines of one's own.",
        "--cases",
    ),
]
Places = Annotated[list[str] | None, option("L:K", "Channel K of layer L; may be repeated.")]
Find = Annotated[bool, flag("--find", "Find it, by what writes at the cases' targets.")]
Controls = Annotated[int, option("N", "Control channels drawn beside each channel.")]
ControlFromWhere = Annotated[str, option("WHERE", "Drawn from the same layer, or the whole model.")]
Reinitialisations = Annotated[int, option("N", "Random prototypes drawn for each channel.")]
FirstToken = Annotated[bool, flag("--first-token", "Of a target of several tokens, the first.")]


def interventions(
    models: Models,
    cases: CasesFile,
    channel: Places = None,
    find: Find = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: Annotated[
        int, option("N", "Tokens that --find reads of a split; 0 for all.")
    ] = 500_000,
    controls: Controls = 5,
    control_from: ControlFromWhere = "layer",
    by: Annotated[str, option("UNIT", "Changes: relative, in %, or points.")] = "relative",
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    reinitialisations: Reinitialisations = 3,
    first_token: FirstToken = False,
    seed: Annotated[int, option("S", "Of controls and random prototypes.")] = 0,
    out: Annotated[Path | None, option("DIR", "Write JSON, Markdown and Parquet.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Disturb a channel and show what becomes of words, beside channels drawn as controls."""
    _check_choice("--by", by, BY)
    _check_choice("--control-from", control_from, CONTROLS_FROM)
    chosen = parse_places("--channel", "CHANNEL", channel)
    _check(chosen, find, corpus, max_tokens)
    check_outputs(directory=out, inputs=(*models, corpus, cases), overwrite=overwrite)
    from prismlm.instruments.channels.case_files import load_cases
    from prismlm.instruments.channels.effects import TableOptions

    options = TableOptions(
        controls=controls,
        control_from="layer" if control_from == "layer" else "model",
        reinitialisations=reinitialisations,
        minimum_probability=minimum,
        first_token=first_token,
        seed=seed,
    )
    measured: dict[str, Any] = {"channels": chosen, "options": options}
    found = _measured(models, load_cases(cases), corpus, max_tokens or None, **measured)
    unit: By = "relative" if by == "relative" else "points"
    value = {"cases": cases, "models": [item.to_dict() for item in found]}
    if out is not None:
        _write(out, found, value, unit)
    if as_json:
        print_json(value)
        return
    from prismlm.cli.printing.interventions import print_concepts

    print_concepts(found, unit)


def _check(places: list[tuple[int, int]], find: bool, corpus: Path | None, max_tokens: int) -> None:
    if bool(places) == find:
        raise InputError("expected either channels (--channel L:K) or --find.")
    if find and corpus is None:
        raise InputError("--find needs the text to find channels in: --corpus DIR.")
    if max_tokens < 0:
        raise InputError(f"--max-tokens is {max_tokens}: expected at least 1, or 0 for all.")


def _measured(
    models: list[Path],
    cases: tuple[Case, ...],
    corpus: Path | None,
    max_tokens: int | None,
    **asked: Any,
) -> list[ConceptInModel]:
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus import Corpus
    from prismlm.instruments.channels.concepts import concept_in_model
    from prismlm.models.checkpoint import read_checkpoint

    asked |= {"corpus": None if corpus is None else Corpus.open(corpus)}
    asked |= {"max_tokens": max_tokens, "progress": ConsoleReporter()}
    return [
        concept_in_model(*read_checkpoint(path), cases, name=str(path), **asked) for path in models
    ]


def _write(out: Path, found: list[ConceptInModel], value: dict[str, Any], by: By) -> None:
    write_text(out / "interventions.json", json_text(value, indent=2) + "\n")
    for number, item in enumerate(found):
        stem = f"{number}-{Path(item.name).resolve().name}"
        item.table.to_parquet(out / f"{stem}.parquet")
        write_text(out / f"{stem}.md", item.table.to_markdown(by))
    typer.echo(f"wrote {out}", err=True)


def _check_choice(option: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise InputError(
            f"{option} is {value!r}: expected {' or '.join(known)}.{suggest(value, known)}"
        )
