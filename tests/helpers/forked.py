"""Real processes of the command and of scripts, forked from one that has imported everything.

Importing PyTorch, transformers and prismlm takes seconds, and a hundred tests run the command. This
file, run by itself, imports them, and keeps the one table that transformers compiles for the first
model it loads; it forks a child for each line of JSON on stdin, so no test sees another's state.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
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


@functools.lru_cache(maxsize=1)
def server() -> subprocess.Popen[str]:
    """Return the process that the others are forked from; it ends when its stdin does."""
    return subprocess.Popen(
        [sys.executable, __file__],
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
    **environment: str,
) -> Forked:
    """Start the command, or other code, with these arguments and variables of the environment."""
    words = [str(argument) for argument in arguments]
    where = {"cwd": os.path.abspath(cwd), "environment": {"COLUMNS": "100", **environment}}
    return Forked({"arguments": words, "code": code, **where}, stdin)


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


def warm() -> None:
    """Import what the commands import when they run, and let typer read the options once."""
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401
    import typer.main

    import prismlm.cli.app

    with contextlib.suppress(ModuleNotFoundError):
        import datasets  # noqa: F401
        import matplotlib.backends.backend_svg  # noqa: F401
        import scipy.stats  # noqa: F401
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")
    typer.main.get_command = functools.cache(typer.main.get_command)
    for module in pkgutil.walk_packages(prismlm.__path__, "prismlm."):
        if module.name != "prismlm.__main__":
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module.name)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        prismlm.cli.app.app(["generate", os.devnull, "nothing is there"])
    # What libraries left to do at the end, such as a table of what was compiled, takes a child
    # longer than most commands, and is not its to do.
    for finaliser in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        finaliser.atexit = False
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    atexit._clear()
    # What is kept is never looked through again, here or in a child.
    gc.collect()
    gc.freeze()


def be(request: dict[str, Any]) -> None:
    """Become the process that is asked for."""
    os.environ |= request["environment"]
    os.chdir(request["cwd"])
    sys.argv = ["prismlm", *request["arguments"]]
    for number, name in enumerate(STREAMS):
        os.dup2(os.open(request[name], os.O_WRONLY if number else os.O_RDONLY), number)
    # Background jobs of some shells start with SIGINT ignored, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        exec(request["code"], {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    # Taking down what was inherited, object by object, takes longer than most commands.
    os._exit(code)


if __name__ == "__main__":
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        if "ended" in asked:
            ended, status = os.waitpid(asked["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                be(asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    # As for a child.
    os._exit(0)
