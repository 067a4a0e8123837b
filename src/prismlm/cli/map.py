"""prismlm map: all prototypes of a lens on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from prismlm.cli import options as opt
from prismlm.cli.options import flag, load_with_lens, needs, option
from prismlm.cli.output import print_json, show_value, wrote
from prismlm.outputs import check_ending, check_outputs


def map_prototypes(
    model: opt.Model,
    lens: opt.Lens = None,
    html: Annotated[Path | None, option("FILE", "Write a page to look around in.")] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the map and the page.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Lay out the prototypes of a lens in two dimensions, and show them with their names."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.lens.labels.map import map_lens, regions
    from prismlm.lens.layout import find_lens, read_meta
    from prismlm.pages.frame import write_page
    from prismlm.pages.prototype_map import prototype_map_page

    check_outputs(html, inputs=[model], overwrite=overwrite)
    check_ending(html, ".html")
    place = find_lens(Path(model), lens)
    if overwrite or place is None or read_meta(place).map is None:
        needs("umap")
    lm, opened = load_with_lens(model, lens)
    if opened.meta.map is None or overwrite:
        map_lens(opened, lm.head, progress=ConsoleReporter())
    if html is not None:
        write_page(prototype_map_page(opened, f"Prototypes of {Path(model).name}"), html)
        wrote(html)
    made, named = opened.meta.map or {}, [region._asdict() for region in regions(opened)]
    value = {"model": str(model), "lens": str(opened.path), **made, "regions": named}
    print_json(value) if as_json else show_value(value)
