"""Pictures of attention maps: a panel for each head. Needs the extra ``plot``.

Lightness falls evenly from 0 to the largest weight, in one hue, so that any eye and a grey print
keep the order. The scale is that of the square root of weights: a head that gives 0.9 to the token
itself still shows where the rest goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage

from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file
from prismlm.pages.trace_data import visible

MOST_TOKENS = 48
MOST_PANELS = 32
DOTS_PER_INCH = 130
COLUMNS = 4
CELL = 0.19  # inches; a label of 8 points is 0.13 high
FONT_SIZE = 8
LABEL_LETTERS = 14
LETTER = 0.085  # inches, of the widest letters but few
INK, UNSEEN, LINE = "#222222", "#F2F2F2", "#D9D9D9"
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)


def maps_figure(maps: Sequence[AttentionMap]) -> Figure:
    """Return a panel for each map, rows attending to columns, over one colour scale.

    Raises:
        InputError: no map, or more tokens or maps than can be read: 48 and 32.
    """
    if not maps:
        raise InputError("there is no map to draw: choose at least one head.")
    columns_of_text = max(len(one.tokens) for one in maps)
    if columns_of_text > MOST_TOKENS:
        raise InputError(
            f"the text has {columns_of_text} tokens, and a picture shows at most {MOST_TOKENS}: "
            "shorten it, or leave out the picture; the weights have no such limit."
        )
    if len(maps) > MOST_PANELS:
        raise InputError(
            f"{len(maps)} heads are too many for one picture, which shows at most {MOST_PANELS}: "
            "choose a layer, a head or a group."
        )
    columns = min(len(maps), COLUMNS if columns_of_text <= MOST_TOKENS // 2 else COLUMNS // 2)
    rows = math.ceil(len(maps) / columns)
    labels = [[_label(token) for token in one.tokens] for one in maps]
    room = LETTER * max(len(label) for own in labels for label in own) + 0.15
    across = CELL * columns_of_text
    down = CELL * max(len(one.positions) for one in maps)
    wide, high = across + room + 0.15, down + room + 0.35
    bar = 0.75
    figure = Figure(figsize=(wide * columns + 0.2, high * rows + bar))
    # The first token has only itself: its 1 would stretch the scale of all others.
    own = (one.weights[int(one.positions[0] == 0 and len(one.positions) > 1) :] for one in maps)
    top = max(float(weights.max()) for weights in own)
    norm = PowerNorm(0.5, vmin=0, vmax=top)
    size = figure.get_size_inches()
    shown = None
    for number, (one, own) in enumerate(zip(maps, labels, strict=True)):
        row, column = divmod(number, columns)
        left = column * wide + room + 0.1
        bottom = size[1] - row * high - 0.35 - CELL * len(one.positions)
        place = (
            left / size[0],
            bottom / size[1],
            CELL * len(one.tokens) / size[0],
            CELL * len(one.positions) / size[1],
        )
        shown = _panel(figure.add_axes(place), one, own, norm)
    assert shown is not None
    length = min(4.0, size[0] - 1.0)
    axes = figure.add_axes((0.5 / size[0], 0.42 / size[1], length / size[0], 0.11 / size[1]))
    _bar(figure, axes, shown, top)
    return figure


def save_maps(maps: Sequence[AttentionMap], path: Path | str) -> None:
    """Write the picture of :func:`maps_figure` as PNG.

    Raises:
        InputError: as :func:`maps_figure`.
    """
    figure = maps_figure(maps)
    with output_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)


def _panel(axes: Axes, one: AttentionMap, labels: list[str], norm: PowerNorm) -> AxesImage:
    seen = np.arange(len(one.tokens)) <= np.array(one.positions)[:, None]
    weights = np.ma.masked_array(one.weights.numpy(), ~seen)
    axes.set_facecolor(UNSEEN)
    shown = axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="none")
    axes.set_title(one.head.title, loc="left", fontsize=10, color=INK)
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=FONT_SIZE)
    axes.set_yticks(
        range(len(one.positions)), [labels[t] for t in one.positions], fontsize=FONT_SIZE
    )
    axes.tick_params(length=0, pad=2, colors=INK)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        # A token may have dollar signs in it, which would be mathematics.
        text.set_parse_math(False)
    axes.spines[:].set_color(LINE)
    return shown


def _bar(figure: Figure, axes: Axes, shown: AxesImage, top: float) -> None:
    ticks = [tick for tick in TICKS if tick <= top]
    bar = figure.colorbar(shown, cax=axes, orientation="horizontal", ticks=ticks, extend="max")
    bar.ax.set_xticklabels([f"{tick:g}" for tick in ticks], fontsize=FONT_SIZE)
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)  # pyright: ignore
    bar.ax.tick_params(length=2, colors=INK)
    words = "weight of a row's token on a column's; a first token has only itself"
    axes.set_title(words, loc="left", fontsize=FONT_SIZE, color=INK, pad=3)


def _label(token: str) -> str:
    """Return a token as a label: what is not in the font is an empty box."""
    text = visible(token)
    if text.startswith("·") and len(text) > 1:
        # Most tokens begin with a space.
        text = text[1:]
    text = text if len(text) <= LABEL_LETTERS else text[: LABEL_LETTERS - 1] + "…"
    return "".join(letter if _font().get_char_index(ord(letter)) else "□" for letter in text)


@cache
def _font() -> Any:
    return get_font(findfont(FontProperties()))
