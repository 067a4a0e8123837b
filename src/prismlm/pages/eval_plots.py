"""The accuracies of a suite, as PRISM's document draws them, with the band of ±5 % round plain.

Colours are Okabe and Ito's, which people with any common colour blindness tell apart, and hatches
differ too. Needs the extra ``plot``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY = "#222222", "#8A8A8A"
STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "#56B4E9", "label": "plain"},
    "prototype_only": {"color": "#D55E00", "label": "prototypes only", "hatch": "//"},
    "residual_only": {"color": "#BBBBBB", "label": "residual only", "hatch": ".."},
}
WIDTH = 0.8  # of a task's bars together


def accuracy_figure(result: dict[str, Any]) -> Figure:
    """Return bars of each task and of their mean, for each predictor.

    The shaded band spans plain · (1 ± 5 %), lines on bars are ± one standard error, and a dotted
    line is the chance level.

    Args:
        result: of :func:`prismlm.eval.suite.run_suite`.
    """
    tasks, predictors, metric = result["tasks"], result["predictors"], result["metric"]
    names = [task["title"] for task in tasks] + ["mean"]
    figures = [
        {name: task["predictors"][name][metric] for name in predictors} for task in tasks
    ] + [result["mean"]]
    figure = Figure(figsize=(2.2 + 1.1 * len(names), 4.4), layout="constrained")
    axes = figure.subplots()
    places, width = np.arange(len(names)), WIDTH / len(predictors)
    for number, predictor in enumerate(predictors):
        _bars(
            axes,
            places - WIDTH / 2 + (number + 0.5) * width,
            [figure[predictor] for figure in figures],
            width,
            STYLES[predictor],
        )
    _bands(axes, places, [figure["plain"]["value"] for figure in figures], result["band_percent"])
    for number, (place, task) in enumerate(zip(places, tasks, strict=False)):
        ends = place - WIDTH / 2, place + WIDTH / 2
        label = "chance" if number == 0 else ""
        axes.hlines(task["chance"], *ends, color=INK, linestyle=":", linewidth=1.4, label=label)
    axes.set_xticks(places, names, rotation=25, ha="right")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


def _bars(
    axes: Axes, places: np.ndarray, figures: list[dict[str, Any]], width: float, style: Any
) -> None:
    values = [figure["value"] for figure in figures]
    errors = [figure["stderr"] or 0.0 for figure in figures]
    axes.bar(places, values, width, edgecolor="white", linewidth=0.6, **style)
    axes.errorbar(places, values, errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)


def _bands(axes: Axes, places: np.ndarray, plain: list[float], percent: float) -> None:
    label = f"plain ± {percent:g} %"
    for place, value in zip(places, plain, strict=True):
        low, high = value * (1 - percent / 100), value * (1 + percent / 100)
        axes.fill_between(
            [place - WIDTH / 2 - 0.04, place + WIDTH / 2 + 0.04],
            low, high, color=GREY, alpha=0.35, linewidth=0, label=label, zorder=3,
        )  # fmt: skip
        label = ""
