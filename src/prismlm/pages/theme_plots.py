"""The three figures of themes as histograms beside random sequences, as ProtoT's Fig. 2 has them.

Needs the extra ``plot``.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from prismlm.instruments.themes.report import FIGURES, ThemeReport

OWN, CHANCE = "#0072B2", "#BBBBBB"


def theme_figure(report: ThemeReport) -> Figure:
    """Return disentanglement, coverage and number of themes, each as shares of units."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    values = np.arange(1, 11)
    for axes, name in zip(figure.subplots(1, len(FIGURES)), FIGURES, strict=True):
        for place, random in ((-0.2, False), (0.2, True)):
            counts = np.array(report.histogram(name, random=random))
            axes.bar(
                values + place, counts / max(1, counts.sum()), 0.4,
                color=CHANCE if random else OWN, hatch=".." if random else None,
                edgecolor="white", linewidth=0.6,
                label="ten random sequences" if random else report.of,
            )  # fmt: skip
        axes.set_xticks(values)
        axes.set_xlabel(name)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("share of units")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure
