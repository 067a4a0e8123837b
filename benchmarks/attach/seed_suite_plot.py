"""Accuracies of a suite with the band round the plain predictor, as an SVG drawn by hand.

``prismlm eval`` draws the same with matplotlib, whose next version draws it a little otherwise: a
page that is compared with its JSON byte for byte cannot have that.
"""

from __future__ import annotations

from typing import Any

STYLES = {
    "plain": ("#56B4E9", "plain"),
    "prototype_only": ("#D55E00", "prototypes only"),
    "residual_only": ("#BBBBBB", "residual only"),
}
LEFT, TOP, HEIGHT, SLOT, BAR = 48, 40, 260, 88, 22
HIGHEST = 0.8


def draw(result: dict[str, Any]) -> str:
    """Return bars of each task and of their mean, ± one standard error, beside chance."""
    tasks, metric = result["tasks"], result["metric"]
    groups = [
        (task["title"], {name: of[metric] for name, of in task["predictors"].items()})
        for task in tasks
    ]
    groups.append(("mean", result["mean"]))
    chances = [task["chance"] for task in tasks] + [None]
    width = LEFT + SLOT * len(groups) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 34}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{TOP + HEIGHT + 34}" fill="white"/>',
        *_axis(width),
        *_legend(result["band_percent"]),
    ]
    for number, ((title, figures), chance) in enumerate(zip(groups, chances, strict=True)):
        left = LEFT + number * SLOT + (SLOT - 3 * BAR) / 2
        lines += _group(figures, left, result["band_percent"])
        if chance is not None:
            lines.append(
                f'<line x1="{left:.0f}" x2="{left + 3 * BAR:.0f}" y1="{_y(chance):.1f}" '
                f'y2="{_y(chance):.1f}" stroke="#222" stroke-dasharray="2 2"/>'
            )
        lines.append(
            f'<text x="{left + 1.5 * BAR:.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">'
            f"{title}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _y(value: float) -> float:
    return TOP + HEIGHT * (1 - value / HIGHEST)


def _axis(width: int) -> list[str]:
    lines: list[str] = []
    for percent in range(0, round(100 * HIGHEST) + 1, 20):
        y = _y(percent / 100)
        lines += [
            f'<line x1="{LEFT}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>',
        ]
    return lines


def _legend(band: float) -> list[str]:
    entries = [*STYLES.values(), ("#8A8A8A", f"plain ± {band:g} %")]
    lines: list[str] = []
    for number, (colour, name) in enumerate(entries):
        x = LEFT + 140 * number
        lines += [
            f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>',
            f'<text x="{x + 18}" y="22">{name}</text>',
        ]
    x = LEFT + 140 * len(entries)
    return [
        *lines,
        f'<line x1="{x}" x2="{x + 18}" y1="18" y2="18" stroke="#222" stroke-dasharray="2 2"/>',
        f'<text x="{x + 24}" y="22">chance</text>',
    ]


def _group(figures: dict[str, Any], left: float, band: float) -> list[str]:
    lines: list[str] = []
    for number, (name, (colour, _)) in enumerate(STYLES.items()):
        value, error = figures[name]["value"], figures[name]["stderr"]
        x, top = left + number * BAR, _y(value)
        middle = x + BAR / 2
        lines += [
            f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{BAR - 2}" '
            f'height="{TOP + HEIGHT - top:.1f}" fill="{colour}"/>',
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{_y(value - error):.1f}" '
            f'y2="{_y(value + error):.1f}" stroke="#222"/>',
        ]
    plain = figures["plain"]["value"]
    high, low = _y(plain * (1 + band / 100)), _y(plain * (1 - band / 100))
    lines.append(
        f'<rect x="{left - 4:.1f}" y="{high:.1f}" width="{3 * BAR + 8}" '
        f'height="{low - high:.1f}" fill="#8A8A8A" fill-opacity="0.4"/>'
    )
    return lines
