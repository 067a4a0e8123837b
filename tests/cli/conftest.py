from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prismlm

SOURCES = str(Path(prismlm.__file__).parents[1])
PYTHONPATH = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
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
def prism(tmp_path_factory: pytest.TempPathFactory):
    """Run the command in a process of its own, forked from one that has imported everything."""
    directory = tmp_path_factory.mktemp("streams")
    streams = {name: directory / name for name in ("stdin", "stdout", "stderr")}
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("warm.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(*arguments: object, stdin: bytes = b"", columns: int = 100):
        for name, path in streams.items():
            path.write_bytes(stdin if name == "stdin" else b"")
        request = {"arguments": [str(a) for a in arguments], "columns": columns}
        request |= {name: str(path) for name, path in streams.items()}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        stdout, stderr = (streams[name].read_bytes().decode() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    yield run
    server.stdin.close()
    server.wait(timeout=10)


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
