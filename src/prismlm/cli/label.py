"""prismlm label: names for the prototypes of a lens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from prismlm.cli import options as opt
from prismlm.cli.options import check_endpoint, flag, load_with_lens, needs, option
from prismlm.cli.output import print_facts, print_json, say, show_rows
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.lens.lens import Lens

EXAMPLES = 12
# Balanced accuracy; names that say nothing have a half by chance.
SAYS_NOTHING = 0.55
MostUsed = Annotated[int | None, option("N", "Ask for the N with most text.", least=0)]


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
        from prismlm.lens.labels.by_endpoint import ask_for_names
        from prismlm.lens.labels.endpoint import Endpoint

        server = Endpoint(endpoint or "", endpoint_model or "", concurrency, timeout)
        labeller = partial(ask_for_names, endpoint=server, prototypes=prototypes)
    elif prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.lens.labels.write import label_lens

    lm, opened = load_with_lens(model, lens)
    made = label_lens(
        opened, lm.model, overwrite=overwrite, labeller=labeller, progress=ConsoleReporter()
    )
    value = {"model": str(model), "lens": str(opened.path), **made}
    if as_json:
        print_json(value)
        return
    say(f"{made['named']:,} of {made['prototypes']:,} prototypes named\n")
    print_facts(value)
    say("\nDetection and fuzzing: balanced accuracy by words alone; 50 % says nothing.\n")
    if made["asked"] is not None:
        scores = made["asked"]["scores"]["own"].values()
        means = [score["mean"] for score in scores if score is not None]
        if means and max(means) < SAYS_NOTHING:
            say(
                "By their words alone these names do not tell where a prototype fires: they may be "
                "in another language than the corpus. To go back, run `prismlm label --overwrite` "
                "without an endpoint.\n",
                style="yellow",
            )
    _print_examples(opened)


def _print_examples(lens: Lens) -> None:
    """Print some prototypes, evenly through the order of their text: common and rare ones."""
    import numpy as np

    table, order = lens.prototypes, lens.leading
    used = order[table["usage"].to_numpy()[order] > 0]
    chosen = used[np.linspace(0, len(used) - 1, min(EXAMPLES, len(used))).astype(int)]
    columns = {"prototype": "", "name": "", "category": "", "label_score": ".0%"}
    show_rows("Examples", columns, table.take(chosen).to_pylist())
