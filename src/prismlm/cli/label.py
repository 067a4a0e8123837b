"""prismlm label: names for the prototypes of a lens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.format import count
from prismlm.cli.options import (
    Json,
    Lens,
    Model,
    choice,
    flag,
    load_with_lens,
    needs,
    number,
    option,
)
from prismlm.cli.output import console_for_reading, plain, print_cost, print_json, table_of
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.cost import Cost
    from prismlm.index.lens import Lens as OpenedLens
    from prismlm.labels.by_endpoint import EndpointLabeller
    from prismlm.labels.write import Labelling

# Of names that say nothing a half is right by chance.
SAYS_NOTHING = 0.55
SHOWN = 12
SCORERS = ("words", "endpoint")

Url = Annotated[
    str | None,
    option(
        "URL",
        "Ask a language model at any OpenAI-compatible endpoint; a key is read from "
        "OPENAI_API_KEY.",
    ),
]
ModelThere = Annotated[str | None, option("NAME", "What the model is called there.")]
MostUsed = Annotated[
    int | None, number("N", "Ask for the N with most text; the others keep the names made without.")
]


def label(
    model: Model,
    lens: Lens = None,
    endpoint: Url = None,
    endpoint_model: ModelThere = None,
    prototypes: MostUsed = None,
    scorer: Annotated[
        str, choice("SCORER", "words, or endpoint: it judges some names as well.", SCORERS)
    ] = "words",
    scored: Annotated[int, number("N", "Names that the endpoint judges.", 1)] = 100,
    concurrency: Annotated[int, number("N", "Questions at once.", 1)] = 8,
    timeout: Annotated[float, number("SECONDS", "Until a question is given up.", 0.001)] = 120.0,
    price_in: Annotated[
        float | None, number("PRICE", "Of a million tokens in, for the estimate.")
    ] = None,
    price_out: Annotated[float | None, number("PRICE", "Of a million tokens out.")] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace labels that are there.")] = False,
    dry_run: Annotated[
        bool, flag("--dry-run", "Only estimate questions, tokens and price.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Its answers are kept beside the lens, so that the
    same command resumes a run that was interrupted or killed.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.labels.write import estimate_labels, label_lens

    if endpoint is not None:
        needs("openai")
    prices = price_in, price_out
    judged = scored if scorer == "endpoint" else 0
    limits, counts = (concurrency, timeout), (prototypes, judged)
    labeller = _labeller(endpoint, endpoint_model, limits, counts, prices)
    if labeller is None and (dry_run or judged or prototypes is not None):
        raise InputError("--dry-run, --prototypes and --scorer endpoint go with --endpoint URL.")
    lm, opened = load_with_lens(model, lens)
    reporter = ConsoleReporter()
    if labeller is not None and dry_run:
        print_cost(estimate_labels(opened, lm.model, labeller, reporter), as_json=as_json)
        return
    found = label_lens(opened, lm.model, overwrite=overwrite, labeller=labeller, progress=reporter)
    if as_json:
        print_json({"model": str(model), "lens": str(opened.path), **found.to_dict()})
    else:
        _print(found)
        if found.asked is not None:
            _print_asked(found.asked)
        _print_examples(opened)


def _labeller(
    url: str | None,
    model: str | None,
    limits: tuple[int, float],
    counts: tuple[int | None, int],
    prices: tuple[float | None, float | None],
) -> EndpointLabeller | None:
    """Return what names by an endpoint, None where there is none."""
    from prismlm.labels.by_endpoint import EndpointLabeller
    from prismlm.labels.endpoint import Endpoint

    if (url is None) != (model is None):
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    if url is None or model is None:
        return None
    return EndpointLabeller(Endpoint(url, model, *limits), *counts, prices, _announce)


def _announce(cost: Cost) -> None:
    figures = cost.figures
    price = f", price {figures['price']}" if "price" in figures else ""
    typer.echo(
        f"About {figures['requests']:,} questions, {count(figures['tokens_in'])} tokens in, "
        f"{count(figures['tokens_out'])} out{price}. Answers are kept beside the lens.",
        err=True,
    )


def _print_asked(asked: dict[str, Any]) -> None:
    """Print what an endpoint did: how much, what went wrong, and whether its names are better."""
    console = console_for_reading()
    console.print(
        f"\n{asked['named']:,} named by the endpoint: {asked['requests']:,} answers, "
        f"{asked['tokens_in']:,} tokens in, {asked['tokens_out']:,} out"
    )
    for reason, times in asked["failures"].items():
        console.print(f"{times:,} without an answer: {plain(reason)}", style="dim")
    scores, judged = asked["scores"], asked["judged"] or {}
    for name in ("detection", "fuzzing"):
        own, embedded = scores["own"][name], scores["embedded"][name]
        if own is not None:
            console.print(
                f"{name} of these by words {own['mean']:.0%}, of the embedded names in their place "
                f"{embedded['mean']:.0%} ({scores['scored']:,} names)"
            )
        if (one := judged.get(name)) is not None:
            console.print(
                f"{name} by the endpoint {one['mean']:.0%}, with shuffled names "
                f"{one['shuffled']:.0%} ({one['scored']:,} names)"
            )
    own = [one["mean"] for one in scores["own"].values() if one is not None]
    if own and max(own) < SAYS_NOTHING:
        console.print(
            "By their words alone these names do not tell where a prototype fires: they may be in "
            "another language than the corpus. Judge them with --scorer endpoint, or run `prismlm "
            "label --overwrite` without an endpoint.",
            style="yellow",
        )


def _print(found: Labelling) -> None:
    console = console_for_reading()
    console.print(f"{found.named:,} of {found.prototypes:,} prototypes named")
    for name, accuracy, meaning in (
        ("detection", found.detection, "is the passage one of the prototype's?"),
        ("fuzzing", found.fuzzing, "is the marked place one of the prototype's?"),
    ):
        if accuracy is not None:
            said = f"{accuracy.mean:.0%}, with shuffled names {accuracy.shuffled:.0%}"
            console.print(f"{name} {said} · {meaning}")
    console.print(
        f"balanced accuracy of {found.scored:,} names on {found.held_out:,} documents that named "
        "nothing, by words alone; 50 % says nothing",
        style="dim",
    )
    console.print()
    for name, members in sorted(found.categories.items(), key=lambda pair: -pair[1]):
        console.print(f"{members:>7,}  {plain(name)}")


def _print_examples(lens: OpenedLens) -> None:
    """Print some prototypes, evenly through the order of their text: common and rare ones."""
    import numpy as np

    table = lens.prototypes
    order = lens.leading
    used = order[table["usage"].to_numpy()[order] > 0]
    chosen = used[np.linspace(0, len(used) - 1, min(SHOWN, len(used))).astype(int)]
    shown = table_of("*prototype", "name", "category", "*score")
    for row in table.take(chosen).to_pylist():
        score = row["label_score"]
        shown.add_row(
            str(row["prototype"]),
            plain(row["name"]),
            plain(row["category"] or ""),
            "" if score is None else f"{score:.0%}",
        )
    console = console_for_reading()
    console.print()
    console.print(shown)
