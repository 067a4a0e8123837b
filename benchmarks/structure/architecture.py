"""Which package imports which, drawn from the imports themselves.

    python -m benchmarks.structure.architecture [--check]

writes docs/images/architecture.svg. It shows which packages import one another and not how often,
so that it changes only when the structure does.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

from benchmarks.shared.pages import publish

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "prismlm"
IMAGE = Path("docs/images/architecture.svg")

WIDTH, MARGIN, STEP, ROW, BOX, HEIGHT = 920, 24, 50, 48, 112, 30
LANE = 22  # where a box's line leaves it, from its left side

STYLE = """
.ground{fill:#fff} text{fill:#1f2328} .words{fill:#59636e} .box{fill:#eaf2fd;stroke:#3b76c4}
.line{stroke:#9db4cf} .dot,.head{fill:#2f66b0} .against{stroke:#b3541e;stroke-dasharray:5 4}
.line,.against{fill:none;stroke-width:1.5} .against-head{fill:#b3541e} .name{font-weight:600}
@media (prefers-color-scheme:dark){.ground{fill:#0d1117} text{fill:#e6edf3} .words{fill:#9aa4af}
.box{fill:#172a45;stroke:#5b93dd} .line{stroke:#465b76} .dot,.head{fill:#7fb0f2}
.against{stroke:#e8945c} .against-head{fill:#e8945c}}
"""


Box = tuple[str, ...]
"""The names on it: a package, or single modules that lie in neighbouring layers."""


def layers() -> list[list[str]]:
    """Return the layers of pyproject.toml that exist, highest first, each with its names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    named = (row.strip("()").split(" | ") for row in rows)
    return [row for row in named if all(_is_package(n) or _is_module(n) for n in row)]


def parts() -> list[Box]:
    """Return the boxes, highest first; neighbouring layers of single modules share one."""
    boxes: list[Box] = []
    for row in layers():
        if any(_is_package(name) for name in row):
            boxes += [(name,) for name in row]
        elif boxes and _is_module(boxes[-1][0]):
            boxes[-1] = (*boxes[-1], *row)
        else:
            boxes.append(tuple(row))
    return [tuple(sorted(box)) for box in boxes]


def imports(boxes: list[Box]) -> set[tuple[int, int]]:
    """Return the pairs of boxes (importer, imported), late imports counted."""
    place = {name: number for number, box in enumerate(boxes) for name in box}
    graph = grimp.build_graph("prismlm", exclude_type_checking_imports=True, cache_dir=None)
    box_of = {
        module: place[name]
        for module in graph.modules
        if (name := module.partition(".")[2].partition(".")[0]) in place
    }
    return {
        (box_of[importer], box_of[imported])
        for importer in box_of
        for imported in graph.find_modules_directly_imported_by(importer)
        if imported in box_of and box_of[imported] != box_of[importer]
    }


def draw(boxes: list[Box], pairs: set[tuple[int, int]]) -> str:
    """Return the picture: boxes on a stair, each with a line down to what it imports.

    A dot says that the line from above imports the box to the right; the lowest box is as wide as
    the picture, so lines end in it.
    """
    last = len(boxes) - 1
    height = _y(last) + HEIGHT / 2 + 46
    drawing = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>Packages of prismlm and what they import</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height:g}" rx="8"/>',
    ]
    drawing += _lines(last, {pair for pair in pairs if pair[0] < pair[1]})
    against = sorted(pair for pair in pairs if pair[0] > pair[1])
    drawing += [part for low, high in against for part in _against(low, high)]
    for number, box in enumerate(boxes):
        drawing += _box(number, box, last)
    legend = "A dot: the package above it imports the package to its right."
    if against:
        legend += " Dashed: against the order."
    drawing.append(f'<text class="words" x="{MARGIN}" y="{height - 16:g}">{legend}</text>')
    return "\n".join([*drawing, "</svg>", ""])


def _lines(last: int, pairs: set[tuple[int, int]]) -> Iterator[str]:
    """Lines first and dots after them, so that no line crosses a dot."""
    for low in range(1, last):
        importers = [high for high, imported in pairs if imported == low]
        if importers:
            yield _path("line", f"M{_lane(min(importers))} {_y(low)}H{_x(low) - 6}")
    for high in range(last):
        lowest = max((low for importer, low in pairs if importer == high), default=high)
        end = _y(lowest) - HEIGHT / 2 - 6 if lowest == last else _y(lowest)
        yield _path("line", f"M{_lane(high)} {_y(high) + HEIGHT / 2}V{end:g}")
    for high, low in sorted(pairs):
        if low == last:
            yield _head(_lane(high), _y(low) - HEIGHT / 2, "head", down=True)
        else:
            yield f'<circle class="dot" cx="{_lane(high)}" cy="{_y(low)}" r="4"/>'
    for low in sorted({low for _, low in pairs if low != last}):
        yield _head(_x(low), _y(low), "head")


def _against(low: int, high: int) -> Iterator[str]:
    """An import from a lower box to a higher one, on the right-hand side of the stair."""
    x, edge = _x(low) + BOX - LANE, _x(high) + BOX
    yield _path("against", f"M{x} {_y(low) - HEIGHT / 2:g}V{_y(high)}H{edge + 6}")
    yield _head(edge, _y(high), "against-head", left=True)


def _box(number: int, box: Box, last: int) -> Iterator[str]:
    x, y, label = _x(number), _y(number), " · ".join(box)
    width = max(BOX, len(label) * 8 + 24)
    if number == last:
        x, width = MARGIN, WIDTH - 2 * MARGIN
    yield (
        f'<rect class="box" x="{x}" y="{y - HEIGHT / 2:g}" width="{width:g}" height="{HEIGHT}" '
        'rx="5"/>'
    )
    yield (
        f'<text class="name" x="{x + width / 2:g}" y="{y + 4.5}" text-anchor="middle" '
        f'font-size="13">{escape(label)}</text>'
    )


def _path(kind: str, way: str) -> str:
    return f'<path class="{kind}" d="{way}"/>'


def _head(x: float, y: float, kind: str, *, down: bool = False, left: bool = False) -> str:
    turn = 90 if down else 180 if left else 0
    place = f"translate({x:g} {y:g}) rotate({turn})"
    return f'<path class="{kind}" transform="{place}" d="M0 0l-8-4v8z"/>'


def _x(number: int) -> int:
    return MARGIN + number * STEP


def _y(number: int) -> int:
    return MARGIN + HEIGHT // 2 + number * ROW


def _lane(number: int) -> int:
    return _x(number) + LANE


def _is_package(name: str) -> bool:
    return (SOURCE / name).is_dir()


def _is_module(name: str) -> bool:
    return (SOURCE / f"{name}.py").is_file()


def main() -> int:
    """Write the picture, or with ``--check`` say whether it is what the imports give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, and fail if stale")
    args = parser.parse_args()
    boxes = parts()
    return publish({IMAGE: draw(boxes, imports(boxes))}, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
