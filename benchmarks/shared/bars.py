"""Histograms side by side, as an SVG drawn by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 170, 44, 24, 30
BOTTOM = 58


class Bars(NamedTuple):
    """One of the things that are compared.

    Attributes:
        name: what the legend calls it.
        colour: as SVG writes it.
        counts: how many have the values 1, 2, …, by panel.
        control: the same of its control, drawn as a line across each bar.
    """

    name: str
    colour: str
    counts: Mapping[str, Sequence[int]]
    control: Mapping[str, Sequence[int]]


def draw_bars(panels: Sequence[str], compared: Sequence[Bars], control: str) -> str:
    """Return a panel for each figure: shares of what is compared by value, and of its control."""
    total = LEFT + len(panels) * (WIDTH + GAP)
    shares = [
        _shares(counts[panel])
        for one in compared
        for counts in (one.counts, one.control)
        for panel in panels
    ]
    top = max(max(some) for some in shares)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {TOP + HEIGHT + BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total}" height="{TOP + HEIGHT + BOTTOM}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, compared, LEFT + number * (WIDTH + GAP), top)
    y = TOP + HEIGHT + BOTTOM - 10
    for number, one in enumerate(compared):
        x = LEFT + number * 170
        parts += [
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{one.colour}"/>',
            f'<text x="{x + 18}" y="{y}">{one.name}</text>',
        ]
    x = LEFT + len(compared) * 170
    parts += [
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 14}" y2="{y - 4}" stroke="black"/>',
        f'<text x="{x + 20}" y="{y}">{control}</text>',
    ]
    return "\n".join([*parts, "</svg>", ""])


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / sum(counts) for count in counts]


def _panel(panel: str, compared: Sequence[Bars], left: float, top: float) -> list[str]:
    base, values = TOP + HEIGHT, len(compared[0].counts[panel])
    slot = WIDTH / values
    bar = slot * 0.8 / len(compared)
    lines = [
        f'<text x="{left + WIDTH / 2}" y="{TOP - 8}" text-anchor="middle">{panel}</text>',
        f'<line x1="{left}" y1="{base}" x2="{left + WIDTH}" y2="{base}" stroke="#999"/>',
        f'<text x="{left - 6}" y="{TOP + 8}" text-anchor="end">{top:.0%}</text>',
        f'<text x="{left - 6}" y="{base}" text-anchor="end">0</text>',
    ]
    for value in range(values):
        x = left + slot * value
        lines.append(
            f'<text x="{x + slot / 2:.1f}" y="{base + 15}" text-anchor="middle">{value + 1}</text>'
        )
        for number, one in enumerate(compared):
            at = x + slot * 0.1 + bar * number
            own, other = (
                HEIGHT * _shares(counts[panel])[value] / top for counts in (one.counts, one.control)
            )
            lines += [
                f'<rect x="{at:.1f}" y="{base - own:.1f}" width="{bar:.1f}" height="{own:.1f}" '
                f'fill="{one.colour}"/>',
                f'<line x1="{at:.1f}" y1="{base - other:.1f}" x2="{at + bar:.1f}" '
                f'y2="{base - other:.1f}" stroke="black"/>',
            ]
    return lines
