"""prismlm label and map: names for the prototypes of a lens, and all of them on one page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError

MAX_EXAMPLES = 12
# Balanced accuracy; 0.5 is chance.
CHANCE_ACCURACY = 0.55
FOREIGN = (
    "By their words alone these names do not tell where a prototype fires: they may be in another "
    "language than the corpus. To go back, run `prismlm label --overwrite` without an endpoint.\n"
)
MostUsed = Annotated[int | None, option("N", "Ask only about the N with the most text.", min=0)]


def label(
    model: opt.Model,
    lens_name: opt.Lens = None,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    prototypes: MostUsed = None,
    concurrency: Annotated[int, option("N", "Concurrent questions.", min=1)] = 8,
    timeout: Annotated[float, option("SECONDS", "Timeout of a question.", min=0.001)] = 120.0,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Run again to resume.
    """
    server = opt.open_endpoint(endpoint, endpoint_model, concurrency, timeout)
    if server is None and prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    from prismlm.lens.labels.write import ask_for_names, label_lens

    lm, lens = opt.load_with_lens(model, lens_name)
    ask = server and partial(ask_for_names, endpoint=server, prototypes=prototypes)
    settings: dict[str, Any] = {"overwrite": overwrite, "labeller": ask}
    summary = label_lens(lens, lm.model, **settings, progress=ConsoleReporter())
    value = {"model": str(model), "lens": lens.address, **summary}
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
    # Examples, evenly spaced from common to rare prototypes.
    rows, order = lens.prototypes.to_pylist(), lens.by_size.tolist()
    used = [rows[number] for number in order if rows[number]["usage"] > 0]
    examples = used[:: max(1, len(used) // MAX_EXAMPLES)][:MAX_EXAMPLES]
    output.print_rows("Examples", "prototype name category label_score:.0%", examples)


def map_prototypes(
    model: opt.Model,
    lens_name: opt.Lens = None,
    html: Annotated[Path | None, option("FILE", "Write an interactive page.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Lay out the prototypes of a lens in two dimensions, and show them with their names."""
    from prismlm.lens.labels.map import map_lens, regions
    from prismlm.lens.layout import find_lens
    from prismlm.lens.store import files_of
    from prismlm.outputs import write_text
    from prismlm.pages.prototype_map import prototype_map_page

    opt.check_output_files(model, overwrite=overwrite, html=html)
    address = find_lens(model, lens_name)
    if overwrite or address is None or files_of(address).read_meta().map is None:
        opt.require_packages("umap")
    lm, lens = opt.load_with_lens(model, lens_name)
    if lens.meta.map is None or overwrite:
        map_lens(lens, lm.head, progress=ConsoleReporter())
    title = f"Prototypes of {model.name}"
    output.write(html, lambda path: write_text(path, prototype_map_page(lens, title)))
    value = {"model": str(model), "lens": lens.address, **(lens.meta.map or {})}
    value["regions"] = [region._asdict() for region in regions(lens)]
    output.show(value, as_json)
