"""prismlm label: names for the prototypes of a lens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from prismlm.cli.options import Json, Lens, Model, load_with_lens
from prismlm.cli.output import print_json

if TYPE_CHECKING:
    from prismlm.index.lens import Lens as OpenedLens
    from prismlm.labels.write import Accuracy, Labelling

SHOWN = 12


def label(
    model: Model,
    lens: Lens = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace labels that are there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.labels.write import label_lens

    lm, opened = load_with_lens(model, lens)
    found = label_lens(opened, lm.model, overwrite=overwrite, progress=ConsoleReporter())
    if as_json:
        print_json({"model": str(model), "lens": str(opened.path), **found.to_dict()})
    else:
        _print(found)
        _print_examples(opened)


def _print(found: Labelling) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{found.named:,} of {found.prototypes:,} prototypes named")
    for name, accuracy, meaning in (
        ("detection", found.detection, "is the passage one of the prototype's?"),
        ("fuzzing", found.fuzzing, "is the marked place one of the prototype's?"),
    ):
        if accuracy is not None:
            console.print(f"{name} {_said(accuracy)} · {meaning}")
    console.print(
        f"balanced accuracy of {found.scored:,} names on {found.held_out:,} documents that named "
        "nothing, by words alone; 50 % says nothing",
        style="dim",
    )
    console.print()
    for name, count in sorted(found.categories.items(), key=lambda pair: -pair[1]):
        console.print(f"{count:>7,}  {name}")


def _said(accuracy: Accuracy) -> str:
    return f"{accuracy.mean:.0%}, with shuffled names {accuracy.shuffled:.0%}"


def _print_examples(lens: OpenedLens) -> None:
    """Print some prototypes, evenly through the order of use: common and rare ones."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from prismlm.cli.output import plain

    table = lens.prototypes
    order = np.argsort(-table["usage"].to_numpy(), kind="stable")
    used = order[table["usage"].to_numpy()[order] > 0]
    chosen = used[np.linspace(0, len(used) - 1, min(SHOWN, len(used))).astype(int)]
    shown = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("prototype", "name", "category", "score"):
        shown.add_column(heading, justify="right" if heading in ("prototype", "score") else "left")
    for row in table.take(chosen).to_pylist():
        score = row["label_score"]
        shown.add_row(
            str(row["prototype"]),
            Text(plain(row["name"])),
            row["category"] or "",
            "" if score is None else f"{score:.0%}",
        )
    console = Console(highlight=False)
    console.print()
    console.print(shown)
