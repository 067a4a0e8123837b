"""prismlm export: a head and its cards in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prismlm.cli.options import Lens, Model, option


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    to: Annotated[
        Literal["sae-lens", "neuronpedia"],
        option(
            "FORMAT",
            "sae-lens: a dictionary that SAE.load_from_disk reads. neuronpedia: "
            "features, explanations and activations, for the importer of a local instance.",
        ),
    ],
    lens: Lens = None,
) -> None:
    """Write the prototypes for SAELens, or their cards for Neuronpedia."""
    from prismlm.explain.exports import export_neuronpedia, export_sae_lens
    from prismlm.explain.language_model import load

    lm = load(model, lens=lens)
    (export_sae_lens if to == "sae-lens" else export_neuronpedia)(lm, out)
    typer.echo(str(out))
