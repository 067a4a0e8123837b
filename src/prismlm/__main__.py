"""The ``prismlm`` command, also ``python -m prismlm``."""

import io
import os
import sys

INTERRUPTED = 130
# Iterations of about ten nanoseconds; libgomp's default is 300,000.
SPINS = 3000


def main() -> None:
    """Run the command line; exits with 2 on bad input and 130 on Ctrl-C."""
    set_environment()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the encoding lacks become "?".
            stream.reconfigure(errors="replace")
    try:
        from prismlm.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED) from None


def set_environment() -> None:
    """Set environment variables that libraries read on loading, unless the user has set them.

    Waiting OpenMP threads sleep soon. By default they spin for a millisecond after every operation
    of PyTorch; where another process uses one of their cores, that multiplies the time of a step.

    On Linux, Arrow allocates through the C library: its own allocator keeps what it has read, and
    nothing else can use that memory.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    if sys.platform == "linux":
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


if __name__ == "__main__":
    main()
