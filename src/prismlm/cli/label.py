"""prismlm label: names for the prototypes of a lens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli.options import (
    Json,
    Lens,
    Model,
    flag,
    load_with_lens,
    needs,
    number,
    option,
)
from prismlm.cli.output import console_for_reading, plain, print_json, table_of
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.index.lens import Lens as OpenedLens
    from prismlm.labels.endpoint import Endpoint
    from prismlm.labels.write import Labelling

# Of names that say nothing a half is right by chance.
SAYS_NOTHING = 0.55
SHOWN = 12

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
    concurrency: Annotated[int, number("N", "Questions at once.", 1)] = 8,
    timeout: Annotated[float, number("SECONDS", "Until a question is given up.", 0.001)] = 120.0,
    overwrite: Annotated[bool, flag("--overwrite", "Replace labels that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Its answers are kept beside the lens, so that the
    same command resumes a run that was interrupted or killed.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.labels.by_endpoint import EndpointLabeller
    from prismlm.labels.write import label_lens

    found = endpoint_of(endpoint, endpoint_model, concurrency, timeout)
    if found is None and prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    labeller = None if found is None else EndpointLabeller(found, prototypes)
    lm, opened = load_with_lens(model, lens)
    made = label_lens(
        opened, lm.model, overwrite=overwrite, labeller=labeller, progress=ConsoleReporter()
    )
    if as_json:
        print_json({"model": str(model), "lens": str(opened.path), **made.to_dict()})
        return
    _print(made)
    if made.asked is not None:
        _print_asked(made.asked)
    _print_examples(opened)


def endpoint_of(url: str | None, model: str | None, *limits: Any) -> Endpoint | None:
    """Return the endpoint that the options name, None where there is none."""
    if (url is None) != (model is None):
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    if url is None or model is None:
        return None
    needs("openai")
    from prismlm.labels.endpoint import Endpoint

    return Endpoint(url, model, *limits)


def _print_asked(asked: dict[str, Any]) -> None:
    """Print what an endpoint did: how much, what went wrong, and whether its names are better."""
    console = console_for_reading()
    console.print(
        f"\n{asked['named']:,} named by the endpoint: {asked['requests']:,} answers, "
        f"{asked['tokens_in']:,} tokens in, {asked['tokens_out']:,} out"
    )
    for reason, times in asked["failures"].items():
        console.print(f"{times:,} without an answer: {plain(reason)}", style="dim")
    scores = asked["scores"]
    pairs = {kind: (scores["own"][kind], scores["embedded"][kind]) for kind in scores["own"]}
    for kind, (own, embedded) in pairs.items():
        if own is not None:
            console.print(
                f"{kind} of these by words {own['mean']:.0%}, of the embedded names in their place "
                f"{embedded['mean']:.0%} ({scores['scored']:,} names)"
            )
    means = [own["mean"] for own, _ in pairs.values() if own is not None]
    if means and max(means) < SAYS_NOTHING:
        console.print(
            "By their words alone these names do not tell where a prototype fires: they may be in "
            "another language than the corpus. To go back, run `prismlm label --overwrite` without "
            "an endpoint.",
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
