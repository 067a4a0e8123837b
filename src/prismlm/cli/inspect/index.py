"""prismlm inspect index: how far a lens converged, and how varied it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.options import Json, Model
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.index.convergence import LensInspection

# Rows of the convergence table.
POINTS_SHOWN = 12


def index(
    model: Model,
    lens: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="The lens; else the only one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how an index converged, the spread of its documents, and duplicates."""
    import prismlm
    from prismlm.index.convergence import inspect_lens

    lm = prismlm.load(model, lens=lens)
    if lm.lens is None:
        raise InputError(f"{model} has no lens. Build one with `prismlm index`.")
    found = inspect_lens(lm.lens)
    if as_json:
        value = {"model": str(model), "lens": str(lm.lens.path), **found.to_dict()}
        print_json(value)
    else:
        _print(found, str(lm.lens.path))


def _print(found: LensInspection, path: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from prismlm.cli.format import count
    from prismlm.index.layout import trained_on_words

    console = Console(highlight=False)
    console.print(
        f"{count(found.tokens)} tokens of {count(found.documents)} documents · "
        f"model trained on them: {trained_on_words(found.trained_on, found.split)}"
    )
    console.print(
        f"{found.prototypes:,} prototypes · {found.with_contexts:,} with contexts · "
        f"{found.in_use:,} in use"
    )
    console.print()
    _print_convergence(console, found)
    _print_spread(console, found)
    console.print(
        f"{found.contexts:,} contexts from {found.distinct_documents:,} documents; one document "
        f"gives at most {found.largest_document_share:.1%}"
    )
    console.print(
        f"duplicates among the contexts of a prototype: {found.duplicate_share:.1%} with the same "
        f"text, {found.near_duplicate_share:.1%} with a state of cosine above 0.999"
    )
    console.print(Text(path, style="dim"), soft_wrap=True)


def _print_convergence(console: Any, found: LensInspection) -> None:
    from rich.table import Table

    from prismlm.cli.format import count

    if found.converged_at is None:
        console.print("This lens was built before convergence was noted; build it again.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("share of corpus", "tokens", "mean nearest cosine"):
        table.add_column(heading, justify="right")
    points = found.convergence
    step = -(-len(points) // POINTS_SHOWN)
    for point in points[::-1][::step][::-1]:
        table.add_row(
            f"{point['share']:.2%}",
            count(point["tokens"]),
            f"{point['mean_nearest_cosine']:.4f}",
        )
    console.print(table)
    console.print(f"within 1 % of its last value after {found.converged_at:.2%} of the corpus\n")


def _print_spread(console: Any, found: LensInspection) -> None:
    from rich.table import Table

    quantiles = found.spread.quantiles()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("of each prototype")
    for label in next(iter(quantiles.values())):
        table.add_column(label, justify="right")
    for name, values in quantiles.items():
        table.add_row(name.replace("_", " "), *(f"{value:.1f}" for value in values.values()))
    console.print(table)
    console.print()
