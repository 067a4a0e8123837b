"""Figures in matplotlib: half-lives of channels, their gates along a text, and attention maps.

They need the extra ``plot``. The colours are Okabe and Ito's palette for colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file
from prismlm.probes.channels.activations import TextCurves
from prismlm.probes.channels.report import ChannelReport

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8A8A8A"
TOKENS_PER_ROW = 48
# Attention maps. Inches: a label of 8 points is 0.13 high and at most 1.3 wide; with the title of a
# panel.
MAX_TOKENS, MAX_PANELS, COLUMNS = 48, 32, 4
CELL, LABELS, BAR = 0.19, 1.7, 1.0
MAX_LABEL = 14
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
SMALL = {"fontsize": 8, "parse_math": False}  # a token may contain dollar signs


def half_life_figure(report: ChannelReport) -> Figure:
    """Plot a histogram of half-lives for each layer, over one logarithmic axis."""
    lives = {
        layer.layer: [channel["half_life"] for channel in layer.channels]
        for layer in report.layers
        if layer.channels and layer.channels[0]["half_life"] is not None
    }
    if not lives:
        raise InputError(
            f"channels of {report.model or 'this model'} have no half-lives to draw: it has none, "
            "or its decays depend on the token."
        )
    everything = np.concatenate(list(lives.values()))
    bins = np.geomspace(0.97 * everything.min(), 1.03 * everything.max(), 31)
    figure = Figure(figsize=(7, 1.2 + 0.85 * len(lives)), layout="constrained")
    panels = figure.subplots(len(lives), 1, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, (layer, values) in zip(panels, lives.items(), strict=True):
        axes.hist(values, bins=bins.tolist(), color=BLUE, edgecolor="white", linewidth=0.6)
        axes.axvline(float(np.median(values)), color=ORANGE, linewidth=1.6)
        _dress(axes, f"layer {layer}")
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    panels[-1].set_xscale("log")
    panels[-1].xaxis.set_major_formatter(ScalarFormatter())
    panels[-1].xaxis.set_minor_formatter(NullFormatter())
    panels[-1].set_xlabel("half-life in positions, logarithmic", fontsize=10)
    figure.supylabel("channels", fontsize=10)
    figure.suptitle("Half-lives of the channels, by layer; the line is the median", fontsize=11)
    return figure


def curves_figure(text_curves: TextCurves, layer: int, channel: int) -> Figure:
    """Plot a channel's gates along a text, and what it holds of each token (ProtoT, Fig. 3)."""
    curves = next((c for c in text_curves.curves if c.layer == layer), None)
    if curves is None or not 0 <= channel < curves.write.shape[1]:
        raise InputError(f"the text was not read in layer {layer}, channel {channel}.")
    write, read, mass = (
        getattr(curves, name)[:, channel].numpy() for name in ("write", "read", "mass")
    )
    tokens = [visible(token) for token in text_curves.text.tokens]
    rows = max(1, math.ceil(len(tokens) / TOKENS_PER_ROW))
    columns = math.ceil(len(tokens) / rows)
    size = (max(5.5, 1.2 + 0.19 * columns), 0.6 + 3.1 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2 * rows, 1, squeeze=False, height_ratios=[3, 1] * rows).flatten()
    for row, (gates, held) in enumerate(zip(panels[::2], panels[1::2], strict=True)):
        part = slice(row * columns, (row + 1) * columns)
        x = np.arange(len(tokens))[part]
        gates.fill_between(x, write[part], color=BLUE, alpha=0.12, linewidth=0)
        gates.plot(x, write[part], "-o", markersize=3.5, label="write gate", color=BLUE)
        gates.plot(x, read[part], "--s", markersize=3.5, label="read gate", color=ORANGE)
        gates.set_ylim(0, 1.08 * max(write.max(), read.max(), 1e-6))
        held.fill_between(x, mass[part], color=GREY, alpha=0.45, linewidth=0, step="mid")
        held.set_ylim(0, 1.08 * max(mass.max(), 1e-6))
        for axes, unit in ((gates, "share of the gate"), (held, "still held")):
            _dress(axes, unit)
            axes.set_xlim(x[0] - 0.6, x[0] + columns - 0.4)
            axes.set_xticks(x)
        gates.tick_params(labelbottom=False)
        held.set_xticklabels(tokens[part], rotation=90, fontsize=8)
    life = f"half-life {curves.half_life[channel].item():.3g} positions"
    over = " over the text" if curves.decay.ndim == 2 else ""
    title = f"Layer {layer}, channel {channel}: {life}{over}"
    panels[0].set_title(title, loc="left", fontsize=11)
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 0.99), fontsize=9, ncols=2)
    return figure


def most_written(text_curves: TextCurves) -> tuple[int, int]:
    """Return the layer and channel with the largest write gate in a text."""
    best = max(text_curves.curves, key=lambda curves: curves.write.max().item())
    return best.layer, int(best.write.amax(0).argmax())


def _dress(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def maps_figure(maps: Sequence[AttentionMap]) -> Figure:
    """Return a panel for each of 1 to 32 maps of at most 48 tokens: rows attend to columns.

    The scale is the square root of weights: a head with 0.9 on the token itself still shows the
    rest.
    """
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
    side = CELL * tokens + LABELS
    size = (columns * side, rows * side + BAR)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    # The first token has weight 1 on itself, which would dominate the colour scale.
    top = max(float(m.weights[1:].max()) for m in maps)
    norm = PowerNorm(0.5, vmin=0, vmax=top)
    for axes in panels[len(maps) :]:
        axes.remove()
    for axes, m in zip(panels, maps, strict=False):
        later = np.triu(np.ones(m.weights.shape, dtype=bool), 1)
        weights = np.ma.masked_array(m.weights.numpy(), later)
        axes.set_facecolor("#F2F2F2")
        axes.imshow(weights, cmap="Blues", norm=norm, aspect="auto", interpolation="none")
        axes.set_title(m.head.title, loc="left", fontsize=10)
        labels = [_label(token) for token in m.tokens]
        axes.set_xticks(range(len(labels)), labels, rotation=90, **SMALL)
        axes.set_yticks(range(len(labels)), labels, **SMALL)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_color("#D9D9D9")
    options: dict[str, Any] = {"location": "bottom", "aspect": 40, "shrink": 0.6, "extend": "max"}
    ticks = [tick for tick in TICKS if tick <= top]
    panels = panels[: len(maps)]
    bar = figure.colorbar(panels[0].images[0], ax=panels, ticks=ticks, format="{x:g}", **options)
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
