"""Figures of a channel report, as matplotlib Figures. Needs the extra ``plot``.

The colours are Okabe and Ito's palette for colour blindness; line styles and markers differ too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.probes.channels.activations import Kind, TextCurves
from prismlm.probes.channels.report import ChannelReport, LayerReport
from prismlm.probes.results import text_of

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
STYLES: dict[Kind, dict[str, Any]] = {
    "write": {"color": BLUE, "marker": "o"},
    "read": {"color": ORANGE, "marker": "s"},
    "values": {"color": GREEN, "marker": "^"},
}
NAMES: dict[Kind, str] = {"write": "write gates", "read": "read gates", "values": "value heads"}
# Title, unit and name of each metric.
PANELS = (
    ("L1 sparsity ratio", "largest over mean", "sparsity_ratio"),
    ("Gini coefficient", "0 even, 1 − 1/P one alone", "gini"),
    ("Entropy", "share of ln P", "entropy_share"),
    ("Mutual information with the token", "nats, corrected", "mutual_information_corrected"),
)
WIDE_RANGE = 4.0
TOKENS_PER_ROW = 48
LAYERS_PER_LEGEND_COLUMN = 8


def metrics_figure(report: ChannelReport, beside: ChannelReport | None = None) -> Figure:
    """Plot the four metrics over depth; a second model's are dashed (ProtoT, Figs. 8 and 9)."""
    reports = [report] if beside is None else [report, beside]
    if not any(layer.metrics for layer in report.layers):
        raise InputError("metrics over depth need a corpus: read one into the report.")
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for axes, (title, unit, name) in zip(panels, PANELS, strict=True):
        for model, line in zip(reports, ("-", "--"), strict=False):
            for kind, style in STYLES.items():
                rows = [layer.metrics[kind] for layer in model.layers if kind in layer.metrics]
                layers, values = [row["layer"] for row in rows], [row[name] for row in rows]
                widths = sorted({row["width"] for row in rows})
                count = "–".join(str(width) for width in widths[:: max(1, len(widths) - 1)])
                label = f"{NAMES[kind]}{f' of {model.model}' if model.model else ''}, P = {count}"
                if rows:
                    axes.plot(layers, values, line, markersize=5, label=label, **style)
        _dress(axes, title, ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("layer", fontsize=10)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=min(3, len(handles[1])))
    return figure


def half_life_figure(report: ChannelReport) -> Figure:
    """Plot a histogram of half-lives for each layer, over one axis."""
    layers = _with_half_lives(report)
    lives = [_half_lives(layer) for layer in layers]
    everything = np.concatenate(lives)
    low, high = everything.min(), everything.max()
    margin = max((high - low) * 0.03, high * 0.02)
    bins = np.linspace(low - margin, high + margin, 31)
    if high / low > WIDE_RANGE:
        bins = np.geomspace(low, high, 31)
    figure = Figure(figsize=(7, 1.2 + 0.85 * len(layers)), layout="constrained")
    panels = figure.subplots(len(layers), 1, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, layer, values in zip(panels, layers, lives, strict=True):
        axes.hist(values, bins=bins.tolist(), color=BLUE, edgecolor="white", linewidth=0.6)
        axes.axvline(float(np.median(values)), color=ORANGE, linewidth=1.6)
        _dress(axes, ylabel=f"layer {layer.layer}")
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    _half_life_axis(panels[-1], everything)
    figure.supylabel("channels", fontsize=10)
    figure.suptitle("Half-lives of the channels, by layer; the line is the median", fontsize=11)
    return figure


def locality_figure(report: ChannelReport) -> Figure:
    """Plot repetition over half-life of each channel, with quartile means (ProtoT, Table 21)."""
    layers, locality = _with_half_lives(report), report.locality
    if locality is None:
        raise InputError("half-life against repetition needs a corpus: read one into the report.")
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    # From dark to light, so the order survives colour blindness and grey print.
    colours = colormaps["viridis"](np.linspace(0, 0.88, len(layers)))
    for layer, colour in zip(layers, colours, strict=True):
        repetition = [channel["repetition"] or 0.0 for channel in layer.channels]
        label = f"layer {layer.layer}"
        axes.scatter(_half_lives(layer), repetition, 34, [colour], edgecolors="white", label=label)
    lives = np.concatenate([_half_lives(layer) for layer in layers])
    left = float(lives.min())
    for row in locality.rows:
        mean, right = row["repetition"], row["half_life_to"]
        if not math.isnan(mean):
            label = "mean of a quartile" if row["quartile"] == 1 else ""
            axes.hlines(mean, left, right, color=ORANGE, linewidth=2.6, label=label, zorder=3)
        left = right
    title = "Do channels with a short half-life use few tokens?"
    _dress(axes, title, ylabel="repetition, 1 − distinct / all")
    axes.set_ylim(-0.03, 1.03)
    _half_life_axis(axes, lives)
    columns = 1 + len(layers) // LAYERS_PER_LEGEND_COLUMN
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9, ncols=columns)
    facts = (
        f"{name.replace('_', ' ')}: {text_of(value, '' if isinstance(value, int) else '.3g')}"
        for name, value in locality.facts.items()
    )
    figure.supxlabel("\n".join(facts), x=0.01, ha="left", fontsize=9)
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
        gates.plot(x, write[part], "-", markersize=3.5, label="write gate", **STYLES["write"])
        gates.plot(x, read[part], "--", markersize=3.5, label="read gate", **STYLES["read"])
        gates.set_ylim(0, 1.08 * max(write.max(), read.max(), 1e-6))
        held.fill_between(x, mass[part], color=GREY, alpha=0.45, linewidth=0, step="mid")
        held.set_ylim(0, 1.08 * max(mass.max(), 1e-6))
        for axes, unit in ((gates, "share of the gate"), (held, "still held")):
            _dress(axes, ylabel=unit)
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


def lag_figure(report: ChannelReport) -> Figure:
    """Plot each layer's cross-correlation of read and write over lags, with its null (§5.1).

    Thin lines are channels, the thick one their median; the band is the mean of the shuffled gates
    ± 1.96 of their standard deviations, each the median over channels.
    """
    layers = [layer for layer in _with_channels(report) if layer.lags is not None]
    if not layers:
        raise InputError("lags need a corpus: read one into the report.")
    columns = min(3, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(1 + 2.9 * columns, 1 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    for axes, layer in zip(panels, layers, strict=False):
        _lags(axes, layer)
        _dress(axes, f"layer {layer.layer}{' (one gate for both)' if layer.shared_gates else ''}")
    words = "lag in positions: above 0, a channel is read before it is written"
    figure.supxlabel(words, fontsize=10)
    figure.supylabel("correlation of read and write", fontsize=10)
    # A layer whose gates never vary has an empty legend.
    legend = max((axes.get_legend_handles_labels() for axes in panels), key=lambda h: len(h[1]))
    if legend[1]:
        figure.legend(*legend, loc="outside upper right", ncols=3, fontsize=9)
    return figure


def _lags(axes: Axes, layer: LayerReport) -> None:
    result = layer.lags
    assert result is not None
    lags, correlation = result["lags"].numpy(), result["correlation"].numpy()
    defined = ~np.isnan(correlation).any(1)
    if defined.any():
        mean = np.median(result["null_mean"].numpy()[defined], 0)
        spread = 1.96 * np.median(result["null_deviation"].numpy()[defined], 0)
        band = {"color": ORANGE, "alpha": 0.35, "linewidth": 0, "label": "shuffled"}
        axes.fill_between(lags, mean - spread, mean + spread, **band)
        channels = axes.plot(lags, correlation[defined].T, color=GREY, linewidth=0.7, alpha=0.55)
        channels[0].set_label("a channel")
        median = np.median(correlation[defined], 0)
        axes.plot(lags, median, "o-", color=BLUE, markersize=4, label="median of channels")
    axes.axvline(0, color=GREY, linewidth=0.7, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def figures(
    report: ChannelReport,
    beside: ChannelReport | None = None,
    curve: tuple[int, int] | None = None,
) -> dict[str, Figure]:
    """Return all figures of a report of channels or heads, by name.

    ``beside`` adds a second model's metrics; ``curve`` is the layer and channel of the text's
    curves, by default the one with the largest write gate.
    """
    plots: dict[str, Figure] = {}
    if report.corpus is not None:
        plots["metrics"] = metrics_figure(report, beside)
    lives = any(_has_half_lives(layer) for layer in report.layers)
    if lives:
        plots["half-life"] = half_life_figure(report)
    if report.locality is not None:
        plots |= {"locality": locality_figure(report)} if lives else {}
        plots["lags"] = lag_figure(report)
    if report.text is not None:
        layer, channel = curve or most_written(report.text)
        plots[f"curves-l{layer}-c{channel}"] = curves_figure(report.text, layer, channel)
    return plots


def most_written(text_curves: TextCurves) -> tuple[int, int]:
    """Return the layer and channel with the largest write gate in a text."""
    best = max(text_curves.curves, key=lambda curves: curves.write.max().item())
    return best.layer, int(best.write.amax(0).argmax())


def _dress(axes: Axes, title: str = "", ylabel: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def _with_channels(report: ChannelReport) -> list[LayerReport]:
    layers = [layer for layer in report.layers if layer.channels]
    if not layers:
        raise InputError(f"the report of {report.model or 'this model'} has no channels to draw.")
    return layers


def _with_half_lives(report: ChannelReport) -> list[LayerReport]:
    layers = [layer for layer in _with_channels(report) if _has_half_lives(layer)]
    if not layers:
        raise InputError(
            f"channels of {report.model or 'this model'} have no half-lives to draw: its decays "
            "depend on the token."
        )
    return layers


def _has_half_lives(layer: LayerReport) -> bool:
    return any(channel["half_life"] is not None for channel in layer.channels)


def _half_lives(layer: LayerReport) -> np.ndarray:
    return np.array([channel["half_life"] for channel in layer.channels], dtype=float)


def _half_life_axis(axes: Axes, lives: np.ndarray) -> None:
    wide = lives.max() / lives.min() > WIDE_RANGE
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("half-life in positions" + (", logarithmic" if wide else ""), fontsize=10)
