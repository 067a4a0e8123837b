"""A matrix that tests fill: families down, what users do across; its table in a page of docs/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import RESULTS, measured_on, page_options, publish, read_result

BEGIN, END = "<!-- matrix: written by its tests -->\n", "<!-- end of the matrix -->"
REFUSED = "refused"


@dataclass(frozen=True)
class Matrix:
    """A matrix that ``--write-matrix NAME`` fills from the cells of a test file.

    A cell is the note that its test left: empty, or shown under the table. A note that begins with
    ``refused: `` says why the family cannot be used so. ``result`` is the JSON in docs/results/,
    ``page`` the page of docs/ with its markers.
    """

    name: str
    tests: str
    result: str
    page: str

    @property
    def path(self) -> Path:
        """Where the JSON is published."""
        return RESULTS / self.result

    def main(self, description: str | None) -> int:
        """Render, or say whether the page is up to date."""
        given = page_options(description).parse_args()
        return publish(self.pages(given.results), check=given.check)

    def pages(self, results: Path = RESULTS) -> dict[Path, str]:
        """Return the page with the matrix of the JSON between its markers."""
        words = f"{self.tests} --write-matrix {self.name}"
        result = read_result(results / self.result, words, run='pytest -n 0 -m "" ')
        path = results.parent / self.page
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        return {path: f"{before}{BEGIN}\n{render(result)}\n{END}{after}"}


def render(result: dict[str, Any]) -> str:
    """Return the table, its notes, and what it was run with."""
    columns, notes = result["columns"], _notes(result)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, title in result["families"].items():
        row = result["cells"][name]
        shown = [_cell(row[column], notes) for column in columns]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    if notes:
        lines.append("")
    return "\n".join([*lines, measured_on(result["environment"]), ""])


def _notes(result: dict[str, Any]) -> dict[str, int]:
    cells = [row[column] for row in result["cells"].values() for column in result["columns"]]
    kept = dict.fromkeys(_said(note) for note in cells if note)
    return {note: number for number, note in enumerate(kept, 1)}


def _said(note: str) -> str:
    return note.removeprefix(f"{REFUSED}: ")


def _cell(note: str, notes: dict[str, int]) -> str:
    mark = REFUSED if note.startswith(REFUSED) else "✓"
    return f"{mark} ({notes[_said(note)]})" if note else mark
