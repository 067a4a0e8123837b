"""Time prismlm on a GPU, part by part, each in a process of its own and written as it ends.

    bash benchmarks/timing_gpu.sh OUT_DIR                    on a GPU
    bash benchmarks/timing_gpu.sh OUT_DIR --tiny             on a CPU, to see that it runs

Models are made of configurations with random weights; texts are those of the bundled sample.
Writes OUT_DIR/gpu.json and OUT_DIR/gpu.log. A part that fails or takes longer than it may is noted
with its last words, and the next begins; so are those for which no time is left.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# What every part imports, before tiny ones are forked.
import benchmarks.prototype_mixer.timing
import benchmarks.uncertainty_feedback.overhead  # noqa: F401
from benchmarks.gpu import parts
from benchmarks.gpu.parts import Figures, Setting
from benchmarks.shared.environment import environment
from benchmarks.shared.options import script_options
from prismlm.files import read_json, write_json

with suppress(ImportError):
    import prismlm.cli.app
    import prismlm.training  # noqa: F401

LIMIT = 470.0
NEEDED = ("accelerate", "jaxtyping", "pyarrow", "pydantic", "rich", "scipy", "typer", "yaml")
SMALL_FEEDBACK = (
    "--width=32 --layers=1 --vocabulary=64 --batch=2 --length=16 --prompt=4 --tokens=4 --rounds=2"
)
FEEDBACK = "--batch 8 --length 1024 --tokens 200 --rounds 9"


class Part(NamedTuple):
    """What is timed, in which seconds at most."""

    seconds: float
    run: Callable[[Setting], Figures]


def script(module: str, words: str, small: str) -> Callable[[Setting], Figures]:
    """Return a part that is a script of its own, and gives what this writes."""

    def run(setting: Setting) -> Figures:
        out = setting.work / "script.json"
        chosen = (small if setting.tiny else words).split()
        sys.argv = [module, "--device", setting.device, "--out", str(out), *chosen]
        importlib.import_module(f"benchmarks.{module}").main()
        return read_json(out)

    return run


PARTS = {
    "head, gpt2-small": Part(50, lambda s: parts.head_in_model(s, "gpt2-small", 16, 15)),
    "head, gpt2-xl": Part(70, lambda s: parts.head_in_model(s, "gpt2-xl", 4, 12)),
    "mixer": Part(
        70,
        script(
            "prototype_mixer.timing",
            "--parts mixer step --dtypes bfloat16 --rounds 7",
            "--parts mixer step --quick --rounds 1 --threads 1",
        ),
    ),
    "feedback": Part(
        90,
        script(
            "uncertainty_feedback.overhead", f"--rows 64 {FEEDBACK}", f"--rows 4 {SMALL_FEEDBACK}"
        ),
    ),
    "training": Part(100, parts.training),
    "index": Part(90, parts.index),
}
"""In the order of their worth, but that ``index`` reads what ``training`` leaves."""


def main() -> None:
    """Run the parts."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; parts that use them will fail")
    began, result = time.monotonic(), {"tiny": given.tiny, "parts": {}}
    with tempfile.TemporaryDirectory() as work:
        setting = Setting("cpu" if given.tiny else "cuda", given.tiny, Path(work))
        for name in given.parts:
            part, left = PARTS[name], given.limit - (time.monotonic() - began)
            noted = {"failed": "no time was left"}
            if left > 5:
                noted = run_part(name, setting, min(part.seconds, left), given.out / "gpu.log")
            result["parts"][name] = noted
            write_json(given.out / "gpu.json", result)
            print(f"{name}: {noted.get('failed', 'done')}, {noted.get('seconds', 0)} s", flush=True)
    if any("failed" in noted for noted in result["parts"].values()):
        raise SystemExit(1)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = script_options(__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=os.environ.get("OUT"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all")
    given = parser.parse_args()
    if given.out is None:
        parser.error("name the folder to write to, or set OUT")
    given.out = Path(given.out)
    return given


def run_part(name: str, setting: Setting, seconds: float, log: Path) -> Figures:
    """Return the figures of a part, or why there are none; a child that is late is killed."""
    written = setting.work / "part.json"
    written.unlink(missing_ok=True)
    # Where an import starts the GPU, a forked child could not use it.
    context: Any = multiprocessing.get_context("fork" if setting.tiny else "spawn")
    child = context.Process(target=in_child, args=(name, setting, written, log))
    began = time.monotonic()
    child.start()
    child.join(seconds)
    late = child.is_alive()
    if late:
        child.kill()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    took = {"seconds": round(time.monotonic() - began, 1)}
    if late:
        return took | {"failed": f"took more than {seconds:.0f} s"}
    return took | (
        read_json(written) if written.is_file() else {"failed": f"exit code {child.exitcode}"}
    )


def in_child(name: str, setting: Setting, written: Path, log: Path) -> None:
    """Run a part in a group of its own, with its output in the log."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        found = PARTS[name].run(setting)
        figures = {"environment": environment(setting.device), "figures": found}
    except BaseException as error:
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    write_json(written, figures)


if __name__ == "__main__":
    main()
