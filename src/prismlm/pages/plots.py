"""Figures in matplotlib: channels, attention maps, accuracies of a suite. Needs the extra ``plot``.

The colours are Okabe and Ito's palette for colour blindness; line styles, markers and hatches
differ too. Where colours are in order, lightness falls monotonically, also in grey print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from prismlm.corpus.pieces import visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap
from prismlm.outputs import output_file
from prismlm.probes.channels.activations import Kind, TextCurves
from prismlm.probes.channels.report import ChannelReport, LayerReport
from prismlm.probes.results import text_of

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
GATES: dict[Kind, dict[str, Any]] = {
    "write": {"color": BLUE, "marker": "o"},
    "read": {"color": ORANGE, "marker": "s"},
    "values": {"color": GREEN, "marker": "^"},
}
GATE_NAMES: dict[Kind, str] = {
    "write": "write gates", "read": "read gates", "values": "value heads"
}  # fmt: skip
# Title, unit and name of each metric.
METRICS = (
    ("L1 sparsity ratio", "largest over mean", "sparsity_ratio"),
    ("Gini coefficient", "0 even, 1 − 1/P one alone", "gini"),
    ("Entropy", "share of ln P", "entropy_share"),
    ("Mutual information with the token", "nats, corrected", "mutual_information_corrected"),
)
WIDE_RANGE = 4.0
TOKENS_PER_ROW = 48
LAYERS_PER_LEGEND_COLUMN = 8
# Attention maps. Inches: a label of 8 points is 0.13 high and at most 1.3 wide; with the title of a
# panel.
MAX_TOKENS, MAX_PANELS, COLUMNS = 48, 32, 4
CELL, LABELS, BAR = 0.19, 1.7, 1.0
MAX_LABEL = 14
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
SMALL = {"fontsize": 8, "parse_math": False}  # a token may contain dollar signs
PREDICTORS: dict[str, dict[str, Any]] = {
    "plain": {"color": "#56B4E9", "label": "plain"},
    "prototype_only": {"color": "#D55E00", "label": "prototypes only", "hatch": "//"},
    "residual_only": {"color": "#BBBBBB", "label": "residual only", "hatch": ".."},
}
WIDTH = 0.8  # of a task's bars together


def channel_figures(
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
    lives = any(len(_half_lives(layer)) for layer in report.layers)
    if lives:
        plots["half-life"] = half_life_figure(report)
    if report.locality is not None:
        plots |= {"locality": locality_figure(report)} if lives else {}
        plots["lags"] = lag_figure(report)
    if report.text is not None:
        layer, channel = curve or most_written(report.text)
        plots[f"curves-l{layer}-c{channel}"] = curves_figure(report.text, layer, channel)
    return plots


def metrics_figure(report: ChannelReport, beside: ChannelReport | None = None) -> Figure:
    """Plot the four metrics over depth; a second model's are dashed (ProtoT, Figs. 8 and 9)."""
    reports = [report] if beside is None else [report, beside]
    if not any(layer.metrics for layer in report.layers):
        raise InputError("metrics over depth need a corpus: read one into the report.")
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for axes, (title, unit, name) in zip(panels, METRICS, strict=True):
        for model, line in zip(reports, ("-", "--"), strict=False):
            for kind, style in GATES.items():
                rows = [layer.metrics[kind] for layer in model.layers if kind in layer.metrics]
                layers, values = [row["layer"] for row in rows], [row[name] for row in rows]
                widths = sorted({row["width"] for row in rows})
                count = "–".join(str(width) for width in widths[:: max(1, len(widths) - 1)])
                model_name = f" of {model.model}" if model.model else ""
                label = f"{GATE_NAMES[kind]}{model_name}, P = {count}"
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
    layers, lives = _with_half_lives(report)
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
    (layers, lives), locality = _with_half_lives(report), report.locality
    if locality is None:
        raise InputError("half-life against repetition needs a corpus: read one into the report.")
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["viridis"](np.linspace(0, 0.88, len(layers)))
    for layer, values, colour in zip(layers, lives, colours, strict=True):
        repetition = [channel["repetition"] or 0.0 for channel in layer.channels]
        label = f"layer {layer.layer}"
        axes.scatter(values, repetition, 34, [colour], edgecolors="white", label=label)
    everything = np.concatenate(lives)
    left = float(everything.min())
    for row in locality.rows:
        mean, right = row["repetition"], row["half_life_to"]
        if not math.isnan(mean):
            label = "mean of a quartile" if row["quartile"] == 1 else ""
            axes.hlines(mean, left, right, color=ORANGE, linewidth=2.6, label=label, zorder=3)
        left = right
    title = "Do channels with a short half-life use few tokens?"
    _dress(axes, title, ylabel="repetition, 1 − distinct / all")
    axes.set_ylim(-0.03, 1.03)
    _half_life_axis(axes, everything)
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
        gates.plot(x, write[part], "-", markersize=3.5, label="write gate", **GATES["write"])
        gates.plot(x, read[part], "--", markersize=3.5, label="read gate", **GATES["read"])
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


def most_written(text_curves: TextCurves) -> tuple[int, int]:
    """Return the layer and channel with the largest write gate in a text."""
    best = max(text_curves.curves, key=lambda curves: curves.write.max().item())
    return best.layer, int(best.write.amax(0).argmax())


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
        _plot_lags(axes, layer)
        _dress(axes, f"layer {layer.layer}{' (one gate for both)' if layer.shared_gates else ''}")
    words = "lag in positions: above 0, a channel is read before it is written"
    figure.supxlabel(words, fontsize=10)
    figure.supylabel("correlation of read and write", fontsize=10)
    # A layer whose gates never vary has an empty legend.
    legend = max((axes.get_legend_handles_labels() for axes in panels), key=lambda h: len(h[1]))
    if legend[1]:
        figure.legend(*legend, loc="outside upper right", ncols=3, fontsize=9)
    return figure


def _plot_lags(axes: Axes, layer: LayerReport) -> None:
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


def _with_half_lives(report: ChannelReport) -> tuple[list[LayerReport], list[np.ndarray]]:
    layers = [layer for layer in _with_channels(report) if len(_half_lives(layer))]
    if not layers:
        raise InputError(
            f"channels of {report.model or 'this model'} have no half-lives to draw: its decays "
            "depend on the token."
        )
    return layers, [_half_lives(layer) for layer in layers]


def _half_lives(layer: LayerReport) -> np.ndarray:
    """Return a layer's half-lives [R], empty if its decays depend on the token."""
    lives = [channel["half_life"] for channel in layer.channels]
    return np.array([life for life in lives if life is not None], dtype=float)


def _half_life_axis(axes: Axes, lives: np.ndarray) -> None:
    wide = lives.max() / lives.min() > WIDE_RANGE
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("half-life in positions" + (", logarithmic" if wide else ""), fontsize=10)


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
    for axes, m in zip(panels, maps, strict=False):
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


def accuracy_figure(result: dict[str, Any]) -> Figure:
    """Plot the result of :func:`prismlm.eval.suite.run_suite`: bars of each task and the mean.

    The band is plain · (1 ± 5 %), error bars are one standard error, dotted lines are chance.
    """
    tasks, predictors = result["tasks"], result["predictors"]
    names = [task["title"] for task in tasks] + ["mean"]
    places, width = np.arange(len(names)), WIDTH / len(predictors)
    figure = Figure(figsize=(2.2 + 1.1 * len(names), 4.4), layout="constrained")
    axes = figure.subplots()
    rows = {
        predictor: [task["predictors"][predictor][result["metric"]] for task in tasks]
        + [result["mean"][predictor]]
        for predictor in predictors
    }
    style = {"error_kw": {"elinewidth": 1, "capsize": 2}, "edgecolor": "white", "linewidth": 0.6}
    for number, predictor in enumerate(predictors):
        x = places - WIDTH / 2 + (number + 0.5) * width
        values = [row["value"] for row in rows[predictor]]
        errors = [row["stderr"] or 0.0 for row in rows[predictor]]
        axes.bar(x, values, width, yerr=errors, **style, **PREDICTORS[predictor])
    percent = result["band_percent"]
    for number, row in enumerate(rows["plain"]):
        ends, value = (number - WIDTH / 2 - 0.04, number + WIDTH / 2 + 0.04), row["value"]
        low, high = value * (1 - percent / 100), value * (1 + percent / 100)
        label = "" if number else f"plain ± {percent:g} %"
        axes.fill_between(ends, low, high, color=GREY, alpha=0.35, label=label, zorder=3)
    chances = [task["chance"] for task in tasks]
    left, right = places[:-1] - WIDTH / 2, places[:-1] + WIDTH / 2
    axes.hlines(chances, left, right, color="#222222", linestyle=":", label="chance")
    axes.set_xticks(places, names, rotation=25, ha="right")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure
