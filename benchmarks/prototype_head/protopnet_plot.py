"""Held-out cross-entropy against CPU time and against tokens, as an SVG drawn by hand."""

from __future__ import annotations

from typing import Any

COLOURS = {
    "plain": "#6b7280",
    "prism": "#2563eb",
    "through": "#059669",
    "dense": "#dc2626",
    "dense-k": "#d97706",
}
WIDTH, HEIGHT = 440, 300
LEFT, TOP, GAP = 52, 20, 60
# Every curve falls from the same height in the first steps; what differs lies below.
TOP_CE = 5.5


def draw(runs: list[dict[str, Any]], names: dict[str, str]) -> str:
    """Return both panels: all seeds of a variant in one colour, the first in the legend."""
    low = min(point["ce"] for run in runs for point in run["curve"])
    floor = int(low * 4) / 4
    total_width = 2 * WIDTH + LEFT + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {HEIGHT + 100}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total_width}" height="{HEIGHT + 100}" fill="white"/>',
        *_panel(runs, "cpu_seconds", "CPU seconds in training steps", LEFT, floor),
        *_panel(runs, "tokens", "tokens", LEFT + WIDTH + GAP, floor),
    ]
    for number, (variant, name) in enumerate(names.items()):
        x = LEFT + number * (total_width - LEFT) / len(names)
        y = HEIGHT + 84
        parts += [
            f'<line x1="{x:.0f}" y1="{y - 4}" x2="{x + 18:.0f}" y2="{y - 4}" '
            f'stroke="{COLOURS[variant]}" stroke-width="2"/>',
            f'<text x="{x + 23:.0f}" y="{y}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    runs: list[dict[str, Any]], axis: str, label: str, left: float, floor: float
) -> list[str]:
    end = max(point[axis] for run in runs for point in run["curve"])

    def x_of(value: float) -> float:
        return left + WIDTH * value / end

    def y_of(ce: float) -> float:
        return TOP + HEIGHT * (TOP_CE - ce) / (TOP_CE - floor)

    clip = f"clip-{axis}"
    lines = [
        f'<clipPath id="{clip}"><rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>'
        "</clipPath>",
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{label}</text>',
        f'<text x="{left}" y="{TOP - 6}">held-out CE, nats per token</text>',
    ]
    ce = floor
    while ce <= TOP_CE:
        y = y_of(ce)
        lines += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#eee"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{ce:.2f}</text>',
        ]
        ce += 0.5
    for number in range(5):
        value = end * number / 4
        lines.append(
            f'<text x="{x_of(value):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">'
            f"{value:,.0f}</text>"
        )
    for run in runs:
        points = " ".join(f"{x_of(p[axis]):.1f},{y_of(p['ce']):.1f}" for p in run["curve"])
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[run["variant"]]}" '
            f'stroke-width="1.5" clip-path="url(#{clip})"/>'
        )
    return lines
