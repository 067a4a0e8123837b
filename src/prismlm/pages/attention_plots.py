"""Pictures of attention maps: a panel for each head. Needs the extra ``plot``.

Lightness falls evenly from 0 to the largest weight, in one hue, so that any eye and a grey print
keep the order. The scale is that of the square root of weights: a head that gives 0.9 to the token
itself still shows where the rest goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file

MOST_TOKENS, MOST_PANELS = 48, 32
COLUMNS = 4
# Inches: a label of 8 points is 0.13 high, and takes 1.3 at most, with the title above a panel.
CELL, LABELS, BAR = 0.19, 1.7, 1.0
LABEL_LETTERS = 14
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
SMALL = {"fontsize": 8, "parse_math": False}


def maps_figure(maps: Sequence[AttentionMap]) -> Figure:
    """Return a panel for each map, rows attending to columns, over one colour scale.

    Raises:
        InputError: no map, or more tokens or maps than can be read: 48 and 32.
    """
    if not maps:
        raise InputError("there is no map to draw: choose at least one head.")
    tokens = max(len(one.tokens) for one in maps)
    if tokens > MOST_TOKENS:
        raise InputError(
            f"the text has {tokens} tokens, and a picture shows at most {MOST_TOKENS}: "
            "shorten it, or leave out the picture; the weights have no such limit."
        )
    if len(maps) > MOST_PANELS:
        raise InputError(
            f"{len(maps)} heads are too many for one picture, which shows at most {MOST_PANELS}: "
            "choose a layer, a head or a group."
        )
    columns = min(len(maps), COLUMNS if tokens <= MOST_TOKENS // 2 else COLUMNS // 2)
    rows = math.ceil(len(maps) / columns)
    high = CELL * max(len(one.positions) for one in maps) + LABELS
    size = (columns * (CELL * tokens + LABELS), rows * high + BAR)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # The first token has only itself: its 1 would stretch the scale of all others.
    own = (one.weights[int(one.positions[0] == 0 and len(one.positions) > 1) :] for one in maps)
    top = max(float(weights.max()) for weights in own)
    norm = PowerNorm(0.5, vmin=0, vmax=top)
    for axes in panels[len(maps) :]:
        axes.remove()
    panels = panels[: len(maps)]
    for axes, one in zip(panels, maps, strict=True):
        seen = np.arange(len(one.tokens)) <= np.array(one.positions)[:, None]
        weights = np.ma.masked_array(one.weights.numpy(), ~seen)
        axes.set_facecolor("#F2F2F2")
        axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="none")
        axes.set_title(one.head.title, loc="left", fontsize=10)
        labels = [_label(token) for token in one.tokens]
        # A token may have dollar signs in it, which would be mathematics.
        axes.set_xticks(range(len(labels)), labels, rotation=90, **SMALL)
        axes.set_yticks(range(len(one.positions)), [labels[t] for t in one.positions], **SMALL)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_color("#D9D9D9")
    bar = figure.colorbar(
        panels[0].images[0],
        ax=panels,
        location="bottom",
        aspect=40,
        shrink=0.6,
        extend="max",
        ticks=[tick for tick in TICKS if tick <= top],
        format="{x:g}",
    )
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8)
    words = "weight of a row's token on a column's; a first token has only itself"
    bar.set_label(words, fontsize=8)
    return figure


def save_maps(maps: Sequence[AttentionMap], path: Path | str) -> None:
    """Write the picture of :func:`maps_figure` as PNG.

    Raises:
        InputError: as :func:`maps_figure`.
    """
    figure = maps_figure(maps)
    with output_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _label(token: str) -> str:
    """Return a token as a label: what is not in the font is an empty box."""
    text = visible(token)
    if text.startswith("·") and len(text) > 1:
        # Most tokens begin with a space.
        text = text[1:]
    text = text if len(text) <= LABEL_LETTERS else text[: LABEL_LETTERS - 1] + "…"
    font = get_font(findfont(FontProperties()))
    return "".join(letter if font.get_char_index(ord(letter)) else "□" for letter in text)
