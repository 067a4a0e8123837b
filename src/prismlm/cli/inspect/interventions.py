"""prismlm inspect interventions: what a model does without a channel, beside control channels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prismlm.cli.options import Json, Models, Overwrite, choice, flag, number, option, parse_places
from prismlm.cli.output import console_for_reading, plain, print_json
from prismlm.errors import InputError
from prismlm.files import json_text
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.instruments.channels.concepts import ConceptInModel
    from prismlm.instruments.channels.effects import By, ControlFrom

UNITS = ("relative", "points")
CasesFile = Annotated[
    str,
    option(
        "NAME|FILE",
        "covid, men, mental_health, new_zealand or women; or JSON lines of one's own.",
        "--cases",
    ),
]
Places = Annotated[list[str] | None, option("L:K", "Channel K of layer L; may be repeated.")]
ControlFromWhere = Annotated[
    str, choice("WHERE", "Drawn from the same layer, or the whole model.", ("layer", "model"))
]
FirstToken = Annotated[bool, flag("--first-token", "Of a target of several tokens, the first.")]


def interventions(
    models: Models,
    cases: CasesFile,
    channel: Places = None,
    find: Annotated[bool, flag("--find", "Find it, by what writes at the cases' targets.")] = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: Annotated[
        int, number("N", "Tokens that --find reads of a split; 0 for all.")
    ] = 500_000,
    controls: Annotated[int, option("N", "Control channels drawn beside each channel.")] = 5,
    control_from: ControlFromWhere = "layer",
    by: Annotated[str, choice("UNIT", "Changes: relative, in %, or points.", UNITS)] = "relative",
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    reinitialisations: Annotated[int, option("N", "Random prototypes drawn for each channel.")] = 3,
    first_token: FirstToken = False,
    seed: Annotated[int, option("S", "Of controls and random prototypes.")] = 0,
    out: Annotated[Path | None, option("DIR", "Write JSON, Markdown and Parquet.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Disturb a channel and show what becomes of words, beside channels drawn as controls."""
    chosen = parse_places("--channel", "CHANNEL", channel)
    if bool(chosen) == find:
        raise InputError("expected either channels (--channel L:K) or --find.")
    if find and corpus is None:
        raise InputError("--find needs the text to find channels in: --corpus DIR.")
    check_outputs(directory=out, inputs=(*models, corpus, cases), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.corpus import Corpus
    from prismlm.instruments.channels.case_files import load_cases
    from prismlm.instruments.channels.concepts import concept_in_model
    from prismlm.instruments.channels.effects import TableOptions
    from prismlm.models.checkpoint import read_checkpoint

    options = TableOptions(
        controls=controls,
        control_from=cast("ControlFrom", control_from),
        reinitialisations=reinitialisations,
        minimum_probability=minimum,
        first_token=first_token,
        seed=seed,
    )
    read = load_cases(cases)
    asked: dict[str, Any] = {"channels": chosen, "options": options, "progress": ConsoleReporter()}
    asked |= {"corpus": Corpus.open(corpus) if corpus else None, "max_tokens": max_tokens or None}
    found = [concept_in_model(*read_checkpoint(m), read, name=str(m), **asked) for m in models]
    value = {"cases": cases, "models": [item.to_dict() for item in found]}
    if out is not None:
        _write(out, found, value, cast("By", by))
    print_json(value) if as_json else _print(found, cast("By", by))


def _write(out: Path, found: list[ConceptInModel], value: dict[str, Any], by: By) -> None:
    from prismlm.instruments.results import markdown_of

    write_text(out / "interventions.json", json_text(value, indent=2) + "\n")
    for place, item in enumerate(found):
        stem = f"{place}-{Path(item.name).resolve().name}"
        item.table.to_parquet(out / f"{stem}.parquet")
        tables = [item.table.summary(), *(item.table.cases(c, by) for c in item.table.channels)]
        write_text(out / f"{stem}.md", "\n".join(map(markdown_of, tables)))
    typer.echo(f"wrote {out}", err=True)


def _print(found: list[ConceptInModel], by: By) -> None:
    """Print every model's channel and tables, and how many models have such a channel."""
    from prismlm.cli.printing.tables import show

    console = console_for_reading()
    for item in found:
        console.print(plain(item.name), style="bold")
        if item.found is not None:
            show(console, item.found)
        if item.heldout_difference is not None:
            console.print(
                f"the same channel on held-out text: {item.heldout_difference:+.2f}, "
                f"{item.heldout_count:,} occurrences\n"
            )
        for place in item.table.channels:
            show(console, item.table.cases(place, by))
        show(console, item.table.summary())
    emerged = [item.emerges for item in found if item.emerges is not None]
    if len(emerged) > 1:
        console.print(f"p below 0.05 in {sum(emerged)} of {len(emerged)} models")
