"""The ``prismlm`` command, ``python -m prismlm`` too: Ctrl-C ends it from its first import on."""

import io
import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130
AGAIN_SECONDS = 0.1
# Turns of a loop, some ten microseconds; libgomp's own are 300,000.
SPINS = 3000


def main() -> None:
    """Run the command line; exits with 2 on bad input and 130 on Ctrl-C."""
    sys.unraisablehook = _interrupt_again
    set_environment()
    replace_what_streams_cannot_write()
    try:
        from prismlm.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        # CPython notes an interrupt that left the exec of a string, as in cli.app.
        exec("")
        raise SystemExit(INTERRUPTED) from None


def set_environment() -> None:
    """Set what libraries read as they are loaded, unless a user has set it. No number changes.

    Threads of OpenMP that wait for each other sleep soon. PyTorch's do so after every operation,
    and by default spin for a millisecond: where another process has one of their cores, that is for
    nothing each time, and takes from the one that is waited for: many times what a step takes.

    Arrow takes its memory from the C library on Linux, as all else does. Its own allocator keeps
    what it had for what was read, more the longer it reads, and nothing else can use that.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def replace_what_streams_cannot_write() -> None:
    """Let output never fail for its encoding: what stdout or stderr cannot write becomes "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _interrupt_again(ignored: Any) -> None:
    """Interrupt once more where CPython ignored it: in a finaliser, or as a module was imported."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        # Later, by another thread: what is raised in here is ignored as well.
        again = (threading.main_thread().ident, signal.SIGINT)
        threading.Timer(AGAIN_SECONDS, signal.pthread_kill, again).start()
    else:
        sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
