"""The accuracies of a suite as in PRISM's document. Needs the extra ``plot``.

The colours are Okabe and Ito's palette for colour blindness; hatches differ too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "#56B4E9", "label": "plain"},
    "prototype_only": {"color": "#D55E00", "label": "prototypes only", "hatch": "//"},
    "residual_only": {"color": "#BBBBBB", "label": "residual only", "hatch": ".."},
}
WIDTH = 0.8  # of a task's bars together


def accuracy_figure(result: dict[str, Any]) -> Figure:
    """Plot the result of :func:`prismlm.eval.suite.run_suite`: bars of each task and the mean.

    The band is plain · (1 ± 5 %), error bars are one standard error, dotted lines are chance.
    """
    tasks, predictors = result["tasks"], result["predictors"]
    names = [task["title"] for task in tasks] + ["mean"]
    places, width = np.arange(len(names)), WIDTH / len(predictors)
    figure = Figure(figsize=(2.2 + 1.1 * len(names), 4.4), layout="constrained")
    axes = figure.subplots()

    def figures(predictor: str) -> list[dict[str, Any]]:
        rows = [task["predictors"][predictor][result["metric"]] for task in tasks]
        return [*rows, result["mean"][predictor]]

    for number, predictor in enumerate(predictors):
        axes.bar(
            places - WIDTH / 2 + (number + 0.5) * width,
            [row["value"] for row in figures(predictor)],
            width,
            yerr=[row["stderr"] or 0.0 for row in figures(predictor)],
            error_kw={"elinewidth": 1, "capsize": 2},
            edgecolor="white",
            linewidth=0.6,
            **STYLES[predictor],
        )
    percent = result["band_percent"]
    for number, row in enumerate(figures("plain")):
        ends, value = (number - WIDTH / 2 - 0.04, number + WIDTH / 2 + 0.04), row["value"]
        low, high = value * (1 - percent / 100), value * (1 + percent / 100)
        label = "" if number else f"plain ± {percent:g} %"
        axes.fill_between(ends, low, high, color="#8A8A8A", alpha=0.35, label=label, zorder=3)
    chances = [task["chance"] for task in tasks]
    left, right = places[:-1] - WIDTH / 2, places[:-1] + WIDTH / 2
    axes.hlines(chances, left, right, color="#222222", linestyle=":", label="chance")
    axes.set_xticks(places, names, rotation=25, ha="right")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure
