from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers import forked
from tests.helpers.forked import PYTHONPATH

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cold_prism() -> Run:
    """Run the command as a user does, in a process started for it."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "prismlm", *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "100"},
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def prism() -> Run:
    """Run the command in a process of its own, forked from one that has imported everything."""
    return forked.run


@pytest.fixture(scope="session")
def refused(prism: Run) -> Callable[..., str]:
    """Run a command that must exit with 2 and a message at the end of stderr; return that."""

    def run(*arguments: object, stdin: bytes = b"") -> str:
        result = prism(*arguments, stdin=stdin)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        message = re.search(r"^error: .*", result.stderr, re.DOTALL | re.MULTILINE)
        assert message is not None, result.stderr
        return message[0]

    return run
