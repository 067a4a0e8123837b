"""What writes a matrix of docs/ from the outcomes of the tests that are its cells."""

import pytest

from benchmarks.shared.environment import environment
from benchmarks.shared.matrix import FAMILIES, UNCERTAINTY, Matrix
from benchmarks.shared.pages import publish
from prismlm.files import read_json, write_json
from tests.helpers import families as of_families
from tests.helpers import feedback_families as of_feedback


class MatrixWriter:
    """Writes JSON and table after a run in which every cell passed; otherwise neither."""

    def __init__(self, matrix: Matrix, titles: dict[str, str], columns: tuple[str, ...]) -> None:
        self.matrix, self.titles, self.columns = matrix, titles, columns
        self.cells: dict[str, dict[str, str]] = {name: {} for name in titles}
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
            for name in self.titles
            for column in self.columns
            if column not in self.cells[name]
        ]
        if missing or self.failed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            said = f"the matrix is not written: not passed {', '.join(missing + self.failed)}"
            session.config.get_terminal_writer().line(f"\n{said}")
            return
        cells = {name: {c: row[c] for c in self.columns} for name, row in self.cells.items()}
        shape = {"columns": list(self.columns), "families": self.titles}
        write_json(self.matrix.path, {"environment": environment()} | shape | {"cells": cells})
        publish(self.matrix.pages(), check=False)


WRITERS = {
    matrix.name: (matrix, helper.TITLES, helper.COLUMNS)
    for matrix, helper in ((UNCERTAINTY, of_feedback), (FAMILIES, of_families))
}


def writer(name: str) -> MatrixWriter:
    """Return what writes the matrix of that name."""
    if name not in WRITERS:
        raise pytest.UsageError(f"there is no matrix {name!r}: expected {', '.join(WRITERS)}")
    return MatrixWriter(*WRITERS[name])


def assert_published(
    config: pytest.Config, matrix: Matrix, titles: dict[str, str], columns: tuple[str, ...]
) -> None:
    """Assert that the JSON has these cells and no others, unless this run is to write it."""
    if config.getoption("--write-matrix") == matrix.name:
        return
    published = read_json(matrix.path)
    assert published["families"] == titles
    assert published["columns"] == list(columns)
    assert {name: list(row) for name, row in published["cells"].items()} == {
        name: list(columns) for name in titles
    }
