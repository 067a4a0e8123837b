"""Real processes of the command and of scripts, forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import prismlm

ROOT = str(Path(__file__).parents[2])
SOURCES = str(Path(prismlm.__file__).parents[1])
PYTHONPATH = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
COMMAND = "import prismlm.cli.app; prismlm.cli.app.main()"
SCRIPT = """
import runpy, sys
sys.path[:0] = {folders!r}
runpy.run_path({path!r}, run_name="__main__")
"""
STREAMS = ("stdin", "stdout", "stderr")


@lru_cache(maxsize=1)
def server() -> subprocess.Popen[str]:
    """Return the process that the others are forked from; it ends when its stdin does."""
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forking.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def ask(request: dict[str, object]) -> int | None:
    """Have the server answer one request."""
    stdin, stdout = server().stdin, server().stdout
    assert stdin is not None
    assert stdout is not None
    print(json.dumps(request), file=stdin, flush=True)
    return json.loads(stdout.readline())


class Forked:
    """What of ``subprocess.Popen`` the tests use, with streams in files."""

    def __init__(self, request: dict[str, object], stdin: bytes) -> None:
        self.streams = tempfile.TemporaryDirectory()
        self.args = request["arguments"]
        for name in STREAMS:
            self.path(name).write_bytes(stdin if name == "stdin" else b"")
        request |= {name: str(self.path(name)) for name in STREAMS}
        self.returncode: int | None = None
        pid = ask(request)
        assert pid is not None
        self.pid = pid

    def path(self, stream: str) -> Path:
        """Return the file of a stream."""
        return Path(self.streams.name) / stream

    def poll(self) -> int | None:
        """Return the exit code, or None as long as it runs."""
        if self.returncode is None:
            self.returncode = ask({"ended": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it runs."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for the end."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(str(self.args), timeout)
            time.sleep(0.005)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr."""
        self.wait(timeout)
        stdout, stderr = (self.path(name).read_bytes().decode() for name in STREAMS[1:])
        return stdout, stderr


def start(
    *arguments: object,
    code: str = COMMAND,
    cwd: Path | str = ".",
    stdin: bytes = b"",
    columns: int = 100,
) -> Forked:
    """Start the command, or other code, with these arguments."""
    words = [str(argument) for argument in arguments]
    request: dict[str, object] = {"name": "prismlm", "arguments": words, "code": code}
    return Forked(request | {"cwd": os.path.abspath(cwd), "columns": columns}, stdin)


def run(
    *arguments: object, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Do the same and wait for the end."""
    process = start(*arguments, **options)
    stdout, stderr = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def run_script(path: Path, *arguments: object, timeout: float = 500):
    """Run a file as ``python path arguments`` does."""
    code = SCRIPT.format(folders=[str(path.parent), ROOT], path=str(path))
    return run(*arguments, code=code, timeout=timeout)
