"""Time one part of prismlm on a GPU and add it to OUT_DIR/gpu.json; timing_gpu.sh runs them all.

    python -m benchmarks.gpu.timing OUT_DIR PART           on a GPU
    python -m benchmarks.gpu.timing OUT_DIR PART --tiny    on a CPU, to see that it runs

Models are made of configurations with random weights; texts are those of the bundled sample.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu import parts
from benchmarks.gpu.parts import Figures, Setting
from benchmarks.shared.environment import environment
from benchmarks.shared.options import script_options
from prismlm.files import read_json, write_json

SMALL_FEEDBACK = (
    "--width=32 --layers=1 --vocabulary=64 --batch=2 --length=16 --prompt=4 --tokens=4 --rounds=2"
)
FEEDBACK = "--batch 8 --length 1024 --tokens 200 --rounds 9"


def script(module: str, words: str, small: str) -> Callable[[Setting], Figures]:
    """Return a part that runs another script and returns what this writes."""

    def run(setting: Setting) -> Figures:
        out = setting.work / "script.json"
        chosen = (small if setting.tiny else words).split()
        sys.argv = [module, "--device", setting.device, "--out", str(out), *chosen]
        importlib.import_module(f"benchmarks.{module}").main()
        return read_json(out)

    return run


PARTS: dict[str, Callable[[Setting], Figures]] = {
    "head, gpt2-small": lambda setting: parts.head_in_model(setting, "gpt2-small", 16, 15),
    "head, gpt2-xl": lambda setting: parts.head_in_model(setting, "gpt2-xl", 4, 12),
    "mixer": script(
        "prototype_mixer.timing",
        "--parts mixer step --dtypes bfloat16 --rounds 7",
        "--parts mixer step --quick --rounds 1 --threads 1",
    ),
    "feedback": script(
        "uncertainty_feedback.overhead", f"--rows 64 {FEEDBACK}", f"--rows 4 {SMALL_FEEDBACK}"
    ),
    "training": parts.training,
    "index": parts.index,
}


def main() -> None:
    """Run a part and write its figures, or note why there are none."""
    parser = script_options(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--failed", metavar="WHY", help="only note that the part failed")
    options = parser.parse_args()
    # What `training` leaves here `index` reads.
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting("cpu" if options.tiny else "cuda", options.tiny, work)
    began = time.monotonic()
    row: Figures = {"failed": options.failed}
    if not options.failed:
        row = {"figures": PARTS[options.part](setting)}
        row |= {"environment": environment(setting.device)}
    row["seconds"] = round(time.monotonic() - began, 1)
    path = options.out / "gpu.json"
    result = read_json(path) if path.is_file() else {"parts": {}}
    write_json(path, {"parts": result["parts"] | {options.part: row}})


if __name__ == "__main__":
    main()
