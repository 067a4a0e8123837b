"""Figures in matplotlib: half-lives of channels, their gates along a text, and attention maps.

They need the extra ``plot``. The colours are Okabe and Ito's palette for colour blindness.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file
from prismlm.probes.channels.activations import TextCurves
from prismlm.probes.channels.report import ChannelReport

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8A8A8A"
# Attention maps, in inches: a cell, the labels of a panel with its title, and the colour bar.
CELL, LABELS, BAR = 0.19, 1.7, 1.0
MAX_TOKENS, MAX_PANELS, COLUMNS = 48, 32, 4
MAX_LABEL = 14
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
    tokens = [visible(token) for token in text_curves.text.tokens]
    x = np.arange(len(tokens))
    figure = Figure(figsize=(max(5.5, 1.2 + 0.19 * len(x)), 3.7), layout="constrained")
    gates, held = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, gate, line, colour in (
        ("write gate", curves.write, "-o", BLUE),
        ("read gate", curves.read, "--s", ORANGE),
    ):
        gates.plot(x, gate[:, channel], line, markersize=3.5, label=name, color=colour)
    mass = curves.mass[:, channel]
    held.fill_between(x, mass, color=GREY, alpha=0.45, linewidth=0, step="mid")
    for axes, unit in ((gates, "share of the gate"), (held, "still held")):
        _dress(axes, unit)
        axes.set_ylim(0)
    held.set_xticks(x, tokens, rotation=90, **SMALL)
    life = f"half-life {curves.half_life[channel].item():.3g} positions"
    over = " over the text" if curves.decay.ndim == 2 else ""
    title = f"Layer {layer}, channel {channel}: {life}{over}"
    gates.set_title(title, loc="left", fontsize=11)
    gates.legend(loc="lower right", bbox_to_anchor=(1, 0.99), fontsize=9, ncols=2)
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
        figure.savefig(temporary, format="png", dpi=130)
