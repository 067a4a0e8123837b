"""A scatter plot of training methods as SVG: what they cost against what prototypes carry."""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 70, 20, 150, 50


class Point(NamedTuple):
    """One method; both figures are percent above the plain model's CE."""

    name: str
    gap: float
    alone: float
    chosen: bool


def draw(points: list[Point], target: float) -> str:
    """Return the plot; the dashed line is the target for the vertical axis."""
    right = max(1.0, *(p.gap for p in points)) * 1.08
    left = min(0.0, *(p.gap for p in points)) - 0.04 * right
    high = max(target, *(p.alone for p in points)) * 1.08

    def x(gap: float) -> float:
        return LEFT + (gap - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def y(alone: float) -> float:
        return HEIGHT - BOTTOM - alone / high * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    parts += [
        _text(x(value), HEIGHT - BOTTOM + 18, f"{value:g} %", "middle") for value in _ticks(right)
    ]
    for value in _ticks(high):
        parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#e6e6e6"))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:g} %", "end"))
    parts += [
        _line(x(0), TOP, x(0), HEIGHT - BOTTOM, "#bbb"),
        _line(LEFT, y(target), WIDTH - RIGHT, y(target), "#888", "4 4"),
        _text(WIDTH - RIGHT + 6, y(target) + 4, f"target {target} %", "start"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "CE above the plain model", "middle"),
        f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">'
        + _text(0, 0, "prototype-only CE above the plain model's CE", "middle")
        + "</g>",
    ]
    taken: list[float] = []
    for point in sorted(points, key=lambda p: p.alone):
        colour = "#c2410c" if point.chosen else "#2563eb"
        parts.append(
            f'<circle cx="{x(point.gap):.1f}" cy="{y(point.alone):.1f}" r="5" fill="{colour}"/>'
        )
        # Labels beside the points of detached methods, which share one column, must not overlap.
        height = y(point.alone) + 4
        while any(abs(height - other) < 13 for other in taken):
            height -= 1
        taken.append(height)
        parts.append(_line(x(point.gap) + 4, y(point.alone), x(point.gap) + 26, height - 4, "#bbb"))
        label = _text(x(point.gap) + 28, height, point.name, "start")
        parts.append(label.replace("<text", '<text font-weight="bold"') if point.chosen else label)
    return "\n".join([*parts, "</svg>", ""])


def _ticks(limit: float) -> list[float]:
    """Return round values from 0 to the limit, about five of them."""
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0) if limit / s <= 6)
    return [step * i for i in range(int(limit / step) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
