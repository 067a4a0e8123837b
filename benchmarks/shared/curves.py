"""Held-out cross-entropy against what was spent on it, as an SVG drawn by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 440, 300
LEFT, TOP, GAP = 52, 20, 60


class Curve(NamedTuple):
    """One run.

    Attributes:
        name: what the legend calls it; of several that are called the same, it shows one.
        colour: as SVG writes it.
        points: what was spent, and the cross-entropy in nats per token.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def draw(panels: Mapping[str, Sequence[Curve]], top: float) -> str:
    """Return panels side by side, by what their axis says, with one legend.

    Args:
        panels: the curves of each.
        top: the largest cross-entropy shown: all curves fall from far above in their first steps.
    """
    every = [curve for curves in panels.values() for curve in curves]
    floor = int(min(ce for curve in every for _, ce in curve.points) * 4) / 4
    total = LEFT + len(panels) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT + 100}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total}" height="{HEIGHT + 100}" fill="white"/>',
    ]
    for number, (label, curves) in enumerate(panels.items()):
        parts += _panel(curves, label, LEFT + number * (WIDTH + GAP), floor, top)
    colours = {curve.name: curve.colour for curve in every}
    for number, (name, colour) in enumerate(colours.items()):
        x = LEFT + number * (total - LEFT) / len(colours)
        y = HEIGHT + 84
        parts += [
            f'<line x1="{x:.0f}" y1="{y - 4}" x2="{x + 18:.0f}" y2="{y - 4}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<text x="{x + 23:.0f}" y="{y}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(curves: Sequence[Curve], label: str, left: float, floor: float, top: float) -> list[str]:
    end = max(spent for curve in curves for spent, _ in curve.points)

    def x_of(value: float) -> float:
        return left + WIDTH * value / end

    def y_of(ce: float) -> float:
        return TOP + HEIGHT * (top - ce) / (top - floor)

    clip = f"clip-{left:.0f}"
    lines = [
        f'<clipPath id="{clip}"><rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>'
        "</clipPath>",
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{label}</text>',
        f'<text x="{left}" y="{TOP - 6}">held-out CE, nats per token</text>',
    ]
    ce = floor
    while ce <= top:
        y = y_of(ce)
        lines += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#eee"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{ce:.2f}</text>',
        ]
        ce += 0.5
    for value in ticks(end):
        said = f"{value / 1e6:g} M" if end >= 1e6 and value else f"{value:,.0f}"
        lines.append(
            f'<text x="{x_of(value):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{said}'
            "</text>"
        )
    for curve in curves:
        points = " ".join(f"{x_of(spent):.1f},{y_of(ce):.1f}" for spent, ce in curve.points)
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{curve.colour}" '
            f'stroke-width="1.5" clip-path="url(#{clip})"/>'
        )
    return lines


def ticks(end: float) -> list[float]:
    """Return three to six round numbers from 0 to at most ``end``, equally far apart."""
    power = 10 ** math.floor(math.log10(end))
    step = next(power * part for part in (0.2, 0.25, 0.5, 1, 2) if end / (power * part) < 6)
    return [step * number for number in range(int(end / step) + 1)]
