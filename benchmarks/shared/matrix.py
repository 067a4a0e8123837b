"""Matrices of families and what users do with them, as they were tried; tables in pages of docs/.

python -m benchmarks.shared.matrix [--check]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import RESULTS, measured_on, page_options, publish, table
from prismlm.files import read_json

BEGIN, END = "<!-- matrix: of its JSON -->\n", "<!-- end of the matrix -->"
REFUSED = "refused"


@dataclass(frozen=True)
class Matrix:
    """A JSON in docs/results/, and the page of docs/ with its markers.

    A cell is a note: empty, or shown under the table. A note that begins with ``refused: `` says
    why the family cannot be used so.
    """

    result: str
    page: str

    def pages(self, results: Path = RESULTS) -> dict[Path, str]:
        """Return the page with the matrix of the JSON between its markers."""
        result = read_json(results / self.result)
        path = results.parent / self.page
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        return {path: f"{before}{BEGIN}\n{render(result)}\n{END}{after}"}


def render(result: dict[str, Any]) -> str:
    """Return the table, a row for families with equal cells, its notes, and what ran it."""
    columns, cells = result["columns"], result["cells"]
    every = [cells[name][column] for name in result["families"] for column in columns]
    notes = list(dict.fromkeys(note.removeprefix(f"{REFUSED}: ") for note in every if note))

    def cell(note: str) -> str:
        mark = REFUSED if note.startswith(REFUSED) else "✓"
        return f"{mark} ({notes.index(note.removeprefix(f'{REFUSED}: ')) + 1})" if note else mark

    rows: dict[tuple[str, ...], list[str]] = {}
    for name, title in result["families"].items():
        rows.setdefault(tuple(cell(cells[name][column]) for column in columns), []).append(title)
    numbered = [f"{number}. {note}\n" for number, note in enumerate(notes, 1)]
    lines = [["; ".join(titles), *row] for row, titles in rows.items()]
    shown = [f"{table(' | '.join(['', *columns]), lines)}\n", "".join(numbered)]
    return "\n".join([*filter(None, shown), f"{measured_on(result['environment'])}\n"])


FAMILIES = Matrix("families.json", "families.md")
UNCERTAINTY = Matrix("uncertainty_matrix.json", "uncertainty_feedback.md")


def main() -> int:
    """Render both, or say whether the pages are up to date."""
    args = page_options(__doc__).parse_args()
    pages = FAMILIES.pages(args.results) | UNCERTAINTY.pages(args.results)
    return publish(pages, check=args.check)


if __name__ == "__main__":
    raise SystemExit(main())
