"""prismlm inspect interventions: what a model does without a channel, beside control channels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from prismlm.cli.options import Json, Models, Overwrite, choice, flag, number, option, parse_places
from prismlm.cli.output import console_for_reading, plain, print_json, table_of
from prismlm.errors import InputError
from prismlm.files import json_text
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.instruments.channels.concepts import ConceptInModel
    from prismlm.instruments.channels.effect_table import By, Channel, ControlFrom, EffectTable

UNITS = ("relative", "points")
CONTEXT_WIDTH = 34
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
    from prismlm.instruments.channels.effect_table import TableOptions
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
    print_json(value) if as_json else print_concepts(found, cast("By", by))


def _write(out: Path, found: list[ConceptInModel], value: dict[str, Any], by: By) -> None:
    write_text(out / "interventions.json", json_text(value, indent=2) + "\n")
    for place, item in enumerate(found):
        stem = f"{place}-{Path(item.name).resolve().name}"
        item.table.to_parquet(out / f"{stem}.parquet")
        write_text(out / f"{stem}.md", item.table.to_markdown(by))
    typer.echo(f"wrote {out}", err=True)


def print_concepts(found: list[ConceptInModel], by: By) -> None:
    """Print every model's channel and table, and how many models have such a channel."""
    console = console_for_reading()
    for item in found:
        console.print(plain(item.name), style="bold")
        _print_ranked(console, item)
        for place in item.table.channels:
            _print_cases(console, item.table, place, by)
        _print_summaries(console, item.table)
        console.print()
    emerged = [item.emerges for item in found if item.emerges is not None]
    if len(emerged) > 1:
        console.print(
            f"a channel stands out beyond random words of like frequency in {sum(emerged)} of "
            f"{len(emerged)} models (p below 0.05 in each)"
        )


def _print_ranked(console: Console, item: ConceptInModel) -> None:
    found = item.found
    if found is None:
        return
    from prismlm.instruments.channels.effect_table import channel_name

    best = found.best
    words = ", ".join(f"{plain(word)} {count:,}" for word, count in found.words.items())
    console.print(f"{words} times in {found.positions:,} tokens of the training split")
    console.print(
        f"written most: {channel_name((best.layer, best.channel))}, {best.difference:+.2f} "
        f"standard deviations above its mean gate ({best.at_words:.3f} beside {best.mean:.3f})"
    )
    console.print(
        f"other channels {found.others_mean:+.2f} ± {found.others_deviation:.2f}; best channel of "
        f"random words {found.shuffled_mean:+.2f} ± {found.shuffled_deviation:.2f}, p {found.p:.3f}"
    )
    if item.heldout_difference is not None:
        console.print(
            f"the same channel on held-out text: {item.heldout_difference:+.2f}, "
            f"{item.heldout_count:,} occurrences"
        )


def _print_cases(console: Console, table: EffectTable, place: Channel, by: By) -> None:
    from prismlm.instruments.channels.effect_table import SHORT, channel_name

    unit = "%" if by == "relative" else "percentage points"
    console.print()
    console.print(
        f"{channel_name(place)}, change in {unit}; {len(table.left_out)} of "
        f"{len(table.left_out) + len(table.probes)} cases left out, whose target has less than "
        f"{100 * table.options.minimum_probability:g} %"
    )
    names = [f"*{SHORT[name]}" for name in table.options.interventions]
    shown = table_of("context", "target", "*base %", *names)
    shown.columns[0].width = CONTEXT_WIDTH
    changes = [table.changes(place, name, by) for name in table.options.interventions]
    for i, probe in enumerate(table.probes):
        flat = " ".join(plain(probe.context).split())
        context = flat if len(flat) <= CONTEXT_WIDTH else f"…{flat[1 - CONTEXT_WIDTH :]}"
        shown.add_row(
            Text(context),
            Text(plain(probe.label)),
            f"{100 * float(table.baseline[i]):.2f}",
            *(f"{column[i]:+.2f}" for column in changes),
        )
    console.print(shown)


def _print_summaries(console: Console, table: EffectTable) -> None:
    from prismlm.instruments.channels.effect_table import SHORT, channel_name, interval_text

    console.print()
    shown = table_of(
        "channel", "intervention", "*median change", "*95 % interval", "*size",
        "*controls' sizes", "*rank", "*p",
    )  # fmt: skip
    for s in table.summaries():
        shown.add_row(
            channel_name((s.layer, s.channel)),
            SHORT[s.intervention],
            f"{s.median_relative:+.2f}",
            interval_text(s.interval),
            f"{s.median_size:.2f}",
            f"{min(s.control_sizes):.2f} to {max(s.control_sizes):.2f}",
            f"{s.rank}/{len(s.control_sizes) + 1}",
            f"{s.p_size:.3f}",
        )
    console.print(shown)
    console.print(
        "Relative changes, in % of the probability: their median, and the median of their "
        "size beside each control's; p over cases, that it is larger",
        style="dim",
    )
