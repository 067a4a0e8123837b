"""prismlm inspect interventions: what a model does without a channel, beside control channels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli.options import flag, option, parse_places
from prismlm.cli.output import print_json, say, show, write_json, wrote
from prismlm.errors import InputError
from prismlm.outputs import check_outputs, write_text

if TYPE_CHECKING:
    from prismlm.probes.channels.concepts import ConceptInModel

    By = Literal["relative", "points"]

CasesFile = Annotated[str, option("NAME|FILE", "Such as covid or women; or JSON lines.")]
ControlFrom = Annotated[Literal["layer", "model"], option(None, "Where controls are drawn from.")]
Unit = Annotated[Literal["relative", "points"], option(None, "Changes: in %, or in points.")]
FirstToken = Annotated[bool, flag("--first-token", "Of a target of several tokens, the first.")]
Reinitialisations = Annotated[int, option("N", "Random prototypes drawn for each channel.")]


def interventions(
    models: opt.Models,
    cases: CasesFile,
    channel: Annotated[list[str] | None, option("L:K", "Channel K of layer L; repeatable.")] = None,
    find: Annotated[bool, flag("--find", "Find it, by what writes at the cases' targets.")] = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: Annotated[int, option("N", "Tokens that --find reads; 0: all.", least=0)] = 500_000,
    controls: Annotated[int, option("N", "Control channels drawn beside each channel.")] = 5,
    control_from: ControlFrom = "layer",
    by: Unit = "relative",
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    reinitialisations: Reinitialisations = 3,
    first_token: FirstToken = False,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Write JSON, Markdown and Parquet.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
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
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.probes.channels.case_files import load_cases
    from prismlm.probes.channels.concepts import concept_in_model
    from prismlm.probes.channels.effects import TableOptions

    options = TableOptions(
        controls=controls,
        control_from=control_from,
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
        _write(out, found, value, by)
    print_json(value) if as_json else _print(found, by)


def _write(out: Path, found: list[ConceptInModel], value: dict[str, Any], by: By) -> None:
    from prismlm.probes.results import markdown_of

    write_json(out / "interventions.json", value)
    for place, item in enumerate(found):
        stem = f"{place}-{Path(item.name).resolve().name}"
        item.table.to_parquet(out / f"{stem}.parquet")
        tables = [item.table.summary(), *(item.table.cases(c, by) for c in item.table.channels)]
        write_text(out / f"{stem}.md", "\n".join(map(markdown_of, tables)))
        wrote(out / f"{stem}.md")


def _print(found: list[ConceptInModel], by: By) -> None:
    """Print every model's channel and tables, and how many models have such a channel."""
    for item in found:
        say(item.name, style="bold")
        if item.found is not None:
            show(item.found)
        if item.heldout_difference is not None:
            say(
                f"the same channel on held-out text: {item.heldout_difference:+.2f}, "
                f"{item.heldout_count:,} occurrences\n"
            )
        for place in item.table.channels:
            show(item.table.cases(place, by))
        show(item.table.summary())
    emerged = [item.emerges for item in found if item.emerges is not None]
    if len(emerged) > 1:
        say(f"p below 0.05 in {sum(emerged)} of {len(emerged)} models")
