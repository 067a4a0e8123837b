"""Attention maps as figures, one panel for each head. Needs the extra ``plot``.

Lightness falls monotonically in one hue, so the order survives colour blindness and grey print. The
scale is the square root of weights: a head with 0.9 on the token itself still shows the rest.
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

MAX_TOKENS, MAX_PANELS = 48, 32
COLUMNS = 4
# Inches: a label of 8 points is 0.13 high and at most 1.3 wide; with the title of a panel.
CELL, LABELS, BAR = 0.19, 1.7, 1.0
MAX_LABEL = 14
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
SMALL = {"fontsize": 8, "parse_math": False}  # a token may contain dollar signs


def maps_figure(maps: Sequence[AttentionMap]) -> Figure:
    """Return a panel for each of 1 to 32 maps of at most 48 tokens: rows attend to columns."""
    if not maps:
        raise InputError("there is no map to draw: choose at least one head.")
    tokens = max(len(m.tokens) for m in maps)
    if tokens > MAX_TOKENS:
        raise InputError(
            f"the text has {tokens} tokens, and a picture shows at most {MAX_TOKENS}: "
            "shorten it, or leave out the picture; the weights have no such limit."
        )
    if len(maps) > MAX_PANELS:
        raise InputError(
            f"{len(maps)} heads are too many for one picture, which shows at most {MAX_PANELS}: "
            "choose a layer, a head or a group."
        )
    columns = min(len(maps), COLUMNS if tokens <= MAX_TOKENS // 2 else COLUMNS // 2)
    rows = math.ceil(len(maps) / columns)
    height = CELL * max(len(m.positions) for m in maps) + LABELS
    size = (columns * (CELL * tokens + LABELS), rows * height + BAR)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # The first token has weight 1 on itself, which would dominate the colour scale.
    rest = (m.weights[int(m.positions[0] == 0 and len(m.positions) > 1) :] for m in maps)
    top = max(float(weights.max()) for weights in rest)
    norm = PowerNorm(0.5, vmin=0, vmax=top)
    for axes in panels[len(maps) :]:
        axes.remove()
    panels = panels[: len(maps)]
    for axes, m in zip(panels, maps, strict=True):
        visible_tokens = np.arange(len(m.tokens)) <= np.array(m.positions)[:, None]
        weights = np.ma.masked_array(m.weights.numpy(), ~visible_tokens)
        axes.set_facecolor("#F2F2F2")
        axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="none")
        axes.set_title(m.head.title, loc="left", fontsize=10)
        labels = [_label(token) for token in m.tokens]
        axes.set_xticks(range(len(labels)), labels, rotation=90, **SMALL)
        axes.set_yticks(range(len(m.positions)), [labels[t] for t in m.positions], **SMALL)
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
    """Write :func:`maps_figure` as PNG."""
    figure = maps_figure(maps)
    with output_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _label(token: str) -> str:
    """Return a token as a label; characters missing in the font become empty boxes."""
    text = visible(token)
    text = text.removeprefix("·") or text  # most tokens begin with a space
    text = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
    font = get_font(findfont(FontProperties()))
    return "".join(letter if font.get_char_index(ord(letter)) else "□" for letter in text)
