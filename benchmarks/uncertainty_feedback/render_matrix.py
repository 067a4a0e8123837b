"""Write the matrix of docs/uncertainty_feedback.md from its JSON; ``--check`` only compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.pages import RESULTS, measured_on, page_options, publish, read_result

RESULT = RESULTS / "uncertainty_matrix.json"
BEGIN, END = "<!-- matrix: written by its tests -->\n", "<!-- end of the matrix -->"


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    return publish(pages(given.results), check=given.check)


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """Return the page with the matrix of the JSON between its markers."""
    tests = "tests/models/uncertainty_feedback/test_feedback_matrix.py --write-uncertainty-matrix"
    result = read_result(results / RESULT.name, tests, run='pytest -n 0 -m "" ')
    path = results.parent / "uncertainty_feedback.md"
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
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
    kept = [note for note in dict.fromkeys(cells) if note and not note.startswith("refused")]
    return {note: number for number, note in enumerate(kept, 1)}


def _cell(note: str, notes: dict[str, int]) -> str:
    if note.startswith("refused"):
        return note
    return f"✓ ({notes[note]})" if note else "✓"


if __name__ == "__main__":
    raise SystemExit(main())
