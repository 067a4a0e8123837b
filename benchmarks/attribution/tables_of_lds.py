"""The tables of LDS on the page on retraining, and the words and figures that it shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.shared.pages import table_head
from prismlm.explain.positions import TEMPERATURE

PRODUCT = f"explain T={TEMPERATURE:g}"
MEANING = {
    "random": "control: documents at random",
    "count of the token": "control: how often the predicted token comes next",
    "bm25": "BM25 (the text and the predicted token)",
    "nearest states": "nearest hidden states, whatever came next",
    "nearest with the same token": "the predicted token came next, nearest state",
    "last-layer K-FAC": "influence by the output layer alone, K-FAC",
    "gradient cosine": "cosine of gradients, all weights",
    "gradient, diagonal Fisher": "product of gradients over the diagonal Fisher, all weights",
    "Bergson EK-FAC": "Bergson's EK-FAC",
    "Bergson TrackStar": "Bergson's TrackStar",
    "Bergson gradient cosine": "Bergson's cosine of gradients",
}
REST = {
    "cells=1": "the one cell with the most evidence",
    "cells=4": "the four cells with the most evidence",
    "signed": "other next tokens count against",
    "doubt=1": "what the model was sure of counts less",
    "whitened=1": "states whitened",
    "by_prototype": "each prototype's evidence kept within its cell",
    "same=10": "what is after the same token counts ten times, as in `explain`",
}


def datamodels(lds: dict[str, Any], chosen: str) -> list[str]:
    """Return the LDS of every method, beside the chosen one's."""
    methods, temperature = lds["methods"], chosen.split()[1]
    lines = table_head("| method | LDS | other half | the first − it | s a prediction | s once |")
    explained = [name for name in methods if name.startswith(("explain", "alone"))]
    names = [chosen, f"evidence {temperature} cells=all", product_name(methods), *explained]
    names.append(f"random states {temperature}")
    shown = [*dict.fromkeys(names), *(name for name in MEANING if name in methods)]
    for name in (name for name in shown if name in methods):
        found, again = methods[name], np.array(methods[name]["resampled"])
        less = "–"
        if name != chosen:
            apart = np.array(methods[chosen]["resampled"]) - again
            difference = methods[chosen]["all"]["mean"] - found["all"]["mean"]
            less = signed((difference, float(apart.std(ddof=1))))
        report, seconds = found["report"], found["seconds"]
        lines.append(
            f"| {name_of(name)} | {found['all']['mean']:.3f} ± {again.std(ddof=1):.3f} | "
            f"{report['mean']:.3f} ± {report['error']:.3f} | {less} | "
            f"{seconds['a prediction']:.3g} | {seconds['once']:.3g} |"
        )
    return lines


def name_of(name: str) -> str:
    """Return what a method is called on the page."""
    if name in MEANING:
        return MEANING[name]
    kind, temperature, *rest = name.replace("random states", "random").split()
    if kind in ("explain", "alone"):
        chosen = "as it comes" if name == PRODUCT else "each prediction alone"
        return f"**`explain`** from cells on disk, {temperature.replace('=', ' ')}, {chosen}"
    if kind == "random":
        return f"control: random states as prototypes, {temperature.replace('=', ' ')}"
    where = {"cells=16": "16 cells", "cells=all": "every position"}
    said = [where.get(part, REST.get(part, part)) for part in rest]
    return f"evidence by position, {temperature.replace('=', ' ')}, {', '.join(said)}"


def temperatures(lds: dict[str, Any], chosen: str) -> list[str]:
    """Return the LDS of evidence by position by temperature and cells."""
    methods = lds["methods"]
    temperatures = [n.split()[-1] for n in methods if n.startswith("random states")]
    lines = table_head("| T | 16 cells | every position | 16 cells of random states |")
    for temperature in temperatures:
        names = [f"evidence {temperature} cells=16", f"evidence {temperature} cells=all"]
        columns: list[str] = []
        for name in (*names, f"random states {temperature}"):
            figure = f"{methods[name]['all']['mean']:.3f} ± {methods[name]['all']['error']:.3f}"
            columns.append(f"**{figure}**" if name == chosen else figure)
        lines.append(f"| {temperature.removeprefix('T=')} | {' | '.join(columns)} |")
    return lines


def rest_of_choices(lds: dict[str, Any]) -> list[str]:
    """Return the LDS of what else was tried."""
    methods = lds["methods"]
    lines = table_head("| at T 0.2 | LDS | 16 cells, plain − it |")
    plain = methods["evidence T=0.2 cells=16"]
    for name in methods:
        last = name.split()[-1]
        if not name.startswith("evidence T=0.2") or last not in REST:
            continue
        found = methods[name]
        where = ", every position" if "cells=all" in name else ""
        lines.append(
            f"| {REST[last]}{where} | {found['all']['mean']:.3f} ± {found['all']['error']:.3f} | "
            f"{signed(paired(plain['each'], found['each']))} |"
        )
    return lines


def product_name(methods: dict[str, Any]) -> str:
    """Return the row of ``explain``, or of what it was when it was last measured."""
    return PRODUCT if PRODUCT in methods else next(n for n in methods if n.startswith("explain"))


def paired(left: Any, right: Any) -> tuple[float, float]:
    """Return the mean of the differences, and its standard error."""
    apart = np.array(left) - np.array(right)
    return float(apart.mean()), float(apart.std(ddof=1) / len(apart) ** 0.5)


def signed(difference: tuple[float, float]) -> str:
    """Return a difference and its error as words."""
    return f"{difference[0]:+.3f} ± {difference[1]:.3f}"
