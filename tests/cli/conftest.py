from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prismlm

SOURCES = str(Path(prismlm.__file__).parents[1])
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def prism() -> Run:
    """Run the real command in a process of its own; COLUMNS is 100 unless it is given."""

    def run(*arguments: object, stdin: bytes = b"", columns: int = 100):
        environment = {**os.environ, "PYTHONPATH": SOURCES, "COLUMNS": str(columns)}
        done = subprocess.run(
            [sys.executable, "-m", "prismlm", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env=environment,
            timeout=120,
            check=False,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


@pytest.fixture(scope="session")
def refused(prism: Run) -> Callable[..., str]:
    """Run a command that must exit with 2 and one message on stderr; return the message."""

    def run(*arguments: object, stdin: bytes = b"") -> str:
        result = prism(*arguments, stdin=stdin)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("error: "), result.stderr
        return result.stderr

    return run
