"""prismlm label and map: names for the prototypes of a lens, and all of them on one page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError

MAX_EXAMPLES = 12
# Balanced accuracy; 0.5 is chance.
CHANCE_ACCURACY = 0.55
FOREIGN = (
    "By their words alone these names do not tell where a prototype fires: they may be in another "
    "language than the corpus. To go back, run `prismlm label --overwrite` without an endpoint.\n"
)
MostUsed = Annotated[int | None, option("N", "Ask for the N with most text.", min=0)]


def label(
    model: opt.Model,
    lens: opt.Lens = None,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    prototypes: MostUsed = None,
    concurrency: Annotated[int, option("N", "Concurrent questions.", min=1)] = 8,
    timeout: Annotated[float, option("SECONDS", "Timeout of a question.", min=0.001)] = 120.0,
    overwrite: Annotated[bool, flag("--overwrite", "Replace existing labels.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Its answers are kept beside the lens, so that the
    same command resumes a run that was interrupted or killed.
    """
    labeller = None
    if opt.check_endpoint(endpoint, endpoint_model):
        opt.require_packages("openai")
        from prismlm.lens.labels.endpoint import Endpoint
        from prismlm.lens.labels.write import ask_for_names

        server = Endpoint(endpoint or "", endpoint_model or "", concurrency, timeout)
        labeller = partial(ask_for_names, endpoint=server, prototypes=prototypes)
    elif prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    from prismlm.lens.labels.write import label_lens

    lm, opened = opt.load_with_lens(model, lens)
    settings: dict[str, Any] = {"overwrite": overwrite, "labeller": labeller}
    summary = label_lens(opened, lm.model, **settings, progress=ConsoleReporter())
    value = {"model": str(model), "lens": str(opened.path), **summary}
    if as_json:
        output.print_json(value)
        return
    output.say(f"{summary['named']:,} of {summary['prototypes']:,} prototypes named\n")
    output.print_facts(value)
    output.say("\nDetection and fuzzing: balanced accuracy by words alone; 50 % is chance.\n")
    scores = summary["asked"]["scores"]["own"].values() if summary["asked"] is not None else ()
    means = [score["mean"] for score in scores if score is not None]
    if means and max(means) < CHANCE_ACCURACY:
        output.say(FOREIGN, style="yellow")
    _print_examples(opened)


def _print_examples(lens: Any) -> None:
    """Print some prototypes, evenly spaced from common to rare ones."""
    import numpy as np

    table, order = lens.prototypes, lens.by_size
    used = order[table["usage"].to_numpy()[order] > 0]
    chosen = used[np.linspace(0, len(used) - 1, min(MAX_EXAMPLES, len(used))).astype(int)]
    columns = {"prototype": "", "name": "", "category": "", "label_score": ".0%"}
    output.print_rows("Examples", columns, table.take(chosen).to_pylist())


def map_prototypes(
    model: opt.Model,
    lens: opt.Lens = None,
    html: Annotated[Path | None, option("FILE", "Write an interactive page.")] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the map and the page.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Lay out the prototypes of a lens in two dimensions, and show them with their names."""
    from prismlm.lens.labels.map import map_lens, regions
    from prismlm.lens.layout import find_lens, read_meta
    from prismlm.outputs import write_text
    from prismlm.pages.prototype_map import prototype_map_page

    opt.check_output_files(model, overwrite=overwrite, html=html)
    directory = find_lens(Path(model), lens)
    if overwrite or directory is None or read_meta(directory).map is None:
        opt.require_packages("umap")
    lm, opened = opt.load_with_lens(model, lens)
    if opened.meta.map is None or overwrite:
        map_lens(opened, lm.head, progress=ConsoleReporter())
    if html is not None:
        write_text(html, prototype_map_page(opened, f"Prototypes of {Path(model).name}"))
        output.report_written(html)
    named = [region._asdict() for region in regions(opened)]
    layout = opened.meta.map or {}
    value = {"model": str(model), "lens": str(opened.path), **layout, "regions": named}
    output.print_json(value) if as_json else output.print_value(value)
