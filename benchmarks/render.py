"""Render the pages of docs/results/ from the JSON beside them; ``--check`` only compares.

    python -m benchmarks.render [PAGE …] [--check] [--results DIR]

A page is a Jinja template, ``benchmarks/pages/NAME.md``: its sentences and the columns of its
tables. What has to be computed from the JSON first is in ``benchmarks/pages/NAME.py``, whose
``figures(read)`` returns the template's variables.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.shared import pages
from benchmarks.shared.over_seeds import HOW, paired, spread
from prismlm.files import read_json

TEMPLATES = Path(__file__).with_name("pages")


class Missing(jinja2.StrictUndefined):
    """What is not there is an error, but for the empty side of ``{{ x if y }}``."""

    def __str__(self) -> str:
        if "inline if-expression" in (self._undefined_hint or ""):
            return ""
        return super().__str__()


def main() -> int:
    """Render, or say whether the pages are up to date."""
    parser = pages.page_options(__doc__)
    known = sorted(path.stem for path in TEMPLATES.glob("*.md"))
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(known)}")
    args = parser.parse_args()
    if unknown := set(args.pages) - set(known):
        parser.error(f"no page is called {', '.join(sorted(unknown))}: {', '.join(known)}")
    rendered = {
        args.results / f"{name}.md": page(name, args.results) for name in args.pages or known
    }
    return pages.publish(rendered, check=args.check)


def page(name: str, results: Path) -> str:
    """Return a page from the JSON in a directory."""

    def read(file: str, *, optional: bool = False) -> Any:
        """Return what a JSON file holds, or the files of a pattern such as ``folder/*.json``."""
        paths = sorted(results.glob(file))
        if not paths:
            if optional:
                return None
            raise SystemExit(f"{results / file} is missing; benchmarks/README.md has its script")
        return [parsed(path) for path in paths] if "*" in file else parsed(paths[0])

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=Missing,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    environment.globals |= {"read": read, "HOW": HOW, **FUNCTIONS}
    module = f"benchmarks.pages.{name}"
    figures: Mapping[str, Any] = {}
    if importlib.util.find_spec(module):
        figures = importlib.import_module(module).figures(read)
    text = environment.get_template(f"{name}.md").render(figures)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def parsed(path: Path) -> Any:
    """Return what a file of JSON or of JSON lines holds."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return read_json(path)


def shown(value: Any, form: str = "") -> str:
    """Return a value in a format, or a dash for none."""
    return "–" if value is None else format(value, form)


def with_error(figure: Mapping[str, float], form: str = ".3f") -> str:
    """Return ``mean`` ± ``error``."""
    return f"{figure['mean']:{form}} ± {figure['error']:.{form.rpartition('.')[2]}}"


def met(reached: bool) -> str:
    """Return whether a goal is reached."""
    return "met" if reached else "**missed**"


FILTERS: dict[str, Callable[..., Any]] = {
    "f": shown,
    "pm": with_error,
    "met": met,
    "ranged": pages.ranged,
    "escaped": pages.escaped,
    "spread": spread,
}
FUNCTIONS: dict[str, Any] = {
    "measured_on": pages.measured_on,
    "paired": paired,
    "runs_made": pages.runs_made,
    "table": pages.table,
    "len": len,
    "zip": zip,
}


if __name__ == "__main__":
    raise SystemExit(main())
