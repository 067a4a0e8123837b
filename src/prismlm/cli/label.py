"""prismlm label: names for the prototypes of a lens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli.options import check_endpoint, flag, load_with_lens, needs, option
from prismlm.cli.output import facts_line, print_json, say, show_rows
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.index.lens import Lens
    from prismlm.labels.write import Labelling

# Of names that say nothing a half is right by chance.
SAYS_NOTHING = 0.55
EXAMPLES = 12
MostUsed = Annotated[
    int | None, option("N", "Ask for the N with most text; others keep their names.", least=0)
]


def label(
    model: opt.Model,
    lens: opt.Lens = None,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    prototypes: MostUsed = None,
    concurrency: Annotated[int, option("N", "Questions at once.", least=1)] = 8,
    timeout: Annotated[float, option("SECONDS", "Of a question.", least=0.001)] = 120.0,
    overwrite: Annotated[bool, flag("--overwrite", "Replace labels that are there.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Its answers are kept beside the lens, so that the
    same command resumes a run that was interrupted or killed.
    """
    labeller = None
    if check_endpoint(endpoint, endpoint_model):
        needs("openai")
        from prismlm.labels.by_endpoint import EndpointLabeller
        from prismlm.labels.endpoint import Endpoint

        server = Endpoint(endpoint or "", endpoint_model or "", concurrency, timeout)
        labeller = EndpointLabeller(server, prototypes)
    elif prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.labels.write import label_lens

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


def _print(made: Labelling) -> None:
    scores = {"detection": made.detection, "fuzzing": made.fuzzing}
    rows = [
        {"score": name, "names": score.mean, "shuffled_names": score.shuffled}
        for name, score in scores.items()
        if score is not None
    ]
    title = f"{made.named:,} of {made.prototypes:,} prototypes named"
    columns = {"score": "", "names": ".0%", "shuffled_names": ".0%"}
    show_rows(title, columns, rows, names=made.scored, held_out_documents=made.held_out)
    say(
        "Balanced accuracy by words alone of telling passages (detection) or marked places\n"
        "(fuzzing) of the prototype from others; 50 % says nothing.\n"
    )
    ranked = sorted(made.categories.items(), key=lambda pair: -pair[1])
    categories = [{"category": name, "prototypes": members} for name, members in ranked]
    show_rows("", {"category": "", "prototypes": ","}, categories)


def _print_asked(asked: dict[str, Any]) -> None:
    """Print what an endpoint did: how much, what went wrong, and whether its names are better."""
    counts = {name: one for name, one in asked.items() if name != "scores"}
    say(f"Endpoint: {facts_line(counts)}")
    scores = asked["scores"]
    rows = [
        {"score": kind, "endpoint": own["mean"], "embedded": scores["embedded"][kind]["mean"]}
        for kind, own in scores["own"].items()
        if own is not None
    ]
    columns = {"score": "", "endpoint": ".0%", "embedded": ".0%"}
    show_rows("These names beside the embedded ones", columns, rows, names=scores["scored"])
    if rows and max(row["endpoint"] for row in rows) < SAYS_NOTHING:
        say(
            "By their words alone these names do not tell where a prototype fires: they may be in "
            "another language than the corpus. To go back, run `prismlm label --overwrite` without "
            "an endpoint.",
            style="yellow",
        )


def _print_examples(lens: Lens) -> None:
    """Print some prototypes, evenly through the order of their text: common and rare ones."""
    import numpy as np

    table, order = lens.prototypes, lens.leading
    used = order[table["usage"].to_numpy()[order] > 0]
    chosen = used[np.linspace(0, len(used) - 1, min(EXAMPLES, len(used))).astype(int)]
    columns = {"prototype": "", "name": "", "category": "", "label_score": ".0%"}
    show_rows("Examples", columns, table.take(chosen).to_pylist())
