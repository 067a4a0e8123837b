"""The matrix of uncertainty feedback: its columns, and what writes it from the tests' outcomes."""

import pytest

from benchmarks.shared.environment import environment
from benchmarks.shared.pages import publish
from benchmarks.uncertainty_feedback.render_matrix import RESULT, pages
from prismlm.files import write_json
from tests.helpers.feedback_families import TITLES

COLUMNS = (
    "greedy",
    "sampling",
    "beams",
    "padding",
    "continued",
    "checkpointing",
    "compile",
    "DDP",
    "FSDP2",
    "save/load",
)


class MatrixWriter:
    """Writes JSON and table after a run in which every cell passed; otherwise neither."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = {name: {} for name in TITLES}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a cell's outcome, in whichever process it was run."""
        if report.failed:
            self.failed.append(report.nodeid)
        cell = dict(report.user_properties).get("cell")
        if report.when == "call" and report.passed and cell:
            family, column, note = cell
            self.cells[family][column] = note

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the matrix, or end with an error."""
        missing = [
            f"{name}-{column}"
            for name in TITLES
            for column in COLUMNS
            if column not in self.cells[name]
        ]
        if missing or self.failed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            said = f"the matrix is not written: not passed {', '.join(missing + self.failed)}"
            session.config.get_terminal_writer().line(f"\n{said}")
            return
        cells = {name: {c: row[c] for c in COLUMNS} for name, row in self.cells.items()}
        result = {"environment": environment(), "columns": list(COLUMNS), "families": TITLES}
        write_json(RESULT, result | {"cells": cells})
        publish(pages(), check=False)
