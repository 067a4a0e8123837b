"""prismlm inspect index: how far a lens converged, and how varied it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from prismlm.cli.format import count
from prismlm.cli.options import Json, Lens, Model, flag, load_with_lens
from prismlm.cli.output import console_for_reading, print_json, table_of

if TYPE_CHECKING:
    from prismlm.index.convergence import LensInspection

# Rows of the convergence table.
POINTS_SHOWN = 12


def index(
    model: Model,
    lens: Lens = None,
    verify: Annotated[
        bool,
        flag("--verify", "Compare the model's weights with what was written too."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how an index converged, the spread of its documents, and duplicates.

    Every file of the lens is compared with what was written.
    """
    from prismlm.index.convergence import inspect_lens
    from prismlm.models.sidecar import verify_weights

    _, opened = load_with_lens(model, lens)
    found = inspect_lens(opened)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    if as_json:
        value = {"model": str(model), "lens": str(opened.path), **verified, **found.to_dict()}
        print_json(value)
        return
    _print(found, str(opened.path))
    for files in verified.values():
        typer.echo(
            f"{files} files of weights hold what was written"
            if files
            else "The weights cannot be verified: an older prismlm noted no checksums of them."
        )


def _print(found: LensInspection, path: str) -> None:
    from prismlm.index.layout import trained_on_words

    console = console_for_reading()
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
    console.print(path, style="dim", soft_wrap=True)
    console.print()
    console.print(found.verdict)


def _print_convergence(console: Console, found: LensInspection) -> None:
    if found.converged_at is None:
        return
    table = table_of("*share of corpus", "*tokens", "*mean nearest cosine")
    points = found.convergence
    step = -(-len(points) // POINTS_SHOWN)
    for point in points[::-1][::step][::-1]:
        table.add_row(
            f"{point['share']:.2%}",
            count(point["tokens"]),
            f"{point['mean_nearest_cosine']:.4f}",
        )
    console.print(table)
    console.print(f"within 1 % of its last value after {found.converged_at:.2%} of the corpus")
    console.print(
        "How close the nearest place read so far is to a prototype, at most 1; mean over "
        "prototypes\n",
        style="dim",
    )


def _print_spread(console: Console, found: LensInspection) -> None:
    quantiles = found.quantiles()
    labels = (f"*{label}" for label in next(iter(quantiles.values())))
    table = table_of("of each prototype", *labels)
    for name, values in quantiles.items():
        table.add_row(name.replace("_", " "), *(f"{value:.1f}" for value in values.values()))
    console.print(table)
    console.print(
        "effective number = exp(entropy): equally weighted items with the same spread\n",
        style="dim",
    )
