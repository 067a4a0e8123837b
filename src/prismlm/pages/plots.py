"""Attention maps as figures of matplotlib, which need the extra ``plot``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file

# Attention maps, in inches: a cell, the labels of a panel with its title, and the colour bar.
CELL, LABELS, BAR = 0.19, 1.7, 1.0
MAX_TOKENS, MAX_PANELS, COLUMNS = 48, 32, 4
MAX_LABEL = 14
SMALL = {"fontsize": 8, "parse_math": False}  # a token may contain dollar signs


def maps_figure(maps: Sequence[AttentionMap]) -> Figure:
    """Return a panel for each of 1 to 32 maps of at most 48 tokens: rows attend to columns.

    The scale is the square root of weights: a head with 0.9 on the token itself still shows the
    rest.
    """
    tokens = max((len(m.tokens) for m in maps), default=0)
    if not 1 <= len(maps) <= MAX_PANELS or tokens > MAX_TOKENS:
        raise InputError(
            f"a picture shows 1 to {MAX_PANELS} heads and at most {MAX_TOKENS} tokens, not "
            f"{len(maps)} and {tokens}: choose a layer, a head or a group, shorten the text, or "
            "leave out the picture."
        )
    columns = min(len(maps), COLUMNS if tokens <= MAX_TOKENS // 2 else COLUMNS // 2)
    rows, side = math.ceil(len(maps) / columns), CELL * tokens + LABELS
    figure = Figure(figsize=(columns * side, rows * side + BAR), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # The first token has weight 1 on itself, which would dominate the colour scale.
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(m.weights[1:].max()) for m in maps))
    for axes in panels[len(maps) :]:
        axes.remove()
    for axes, m in zip(panels, maps, strict=False):
        later = np.triu(np.ones(m.weights.shape, dtype=bool), 1)
        axes.set_facecolor("#F2F2F2")
        axes.imshow(np.ma.masked_array(m.weights.numpy(), later), cmap="Blues", norm=norm)
        axes.set_title(m.head.title, loc="left", fontsize=10)
        labels = [visible(token)[:MAX_LABEL] for token in m.tokens]
        axes.set_xticks(range(len(labels)), labels, rotation=90, **SMALL)
        axes.set_yticks(range(len(labels)), labels, **SMALL)
    panels = panels[: len(maps)]
    options: dict[str, Any] = {"location": "bottom", "aspect": 40, "shrink": 0.6, "extend": "max"}
    bar = figure.colorbar(panels[0].images[0], ax=panels, format="{x:.2g}", **options)
    bar.set_label("weight of a row's token on a column's; a first token has only itself")
    return figure


def save_maps(maps: Sequence[AttentionMap], path: Path | str) -> None:
    """Write :func:`maps_figure` as PNG; characters that the font lacks are boxes."""
    figure = maps_figure(maps)
    with output_file(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.savefig(temporary, format="png", dpi=130, bbox_inches="tight")
