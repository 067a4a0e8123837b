"""PRISM's eight tasks, asked of the demo's model, of its parts, and of the model it was made of.

    prismlm eval prismlm-demo/model --data DIR --limit 100 --out OURS
    prismlm eval SMOLLM2 --data DIR --limit 100 --out BASE
    python -m benchmarks.attach.seed_suite OURS BASE
    python -m benchmarks.attach.render_seed_suite

Puts what the first two wrote into one JSON file, with the difference that fine-tuning made,
question by question. Both have to have asked the same questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.eval.accuracy import HEADLINE
from prismlm.eval.suite import RESULT_FILE, TASKS
from prismlm.files import read_json, write_json

PUBLISHED = {
    "source": "https://huggingface.co/HuggingFaceTB/SmolLM2-135M, “Instruction model”: zero-shot, "
    "by lighteval",
    "percent": {
        "ARC-Challenge and ARC-Easy, average": 37.3,
        "HellaSwag": 40.9,
        "PIQA": 66.3,
        "MMLU, cloze": 29.3,
    },
}
"""What the authors say of SmolLM2-135M-Instruct; of the other tasks they say nothing."""


def main() -> None:
    """Write the file."""
    parser = script_options(__doc__, RESULTS / "seed_suite.json")
    parser.add_argument("ours", type=Path, help="what `prismlm eval` wrote of the demo's model")
    parser.add_argument("base", type=Path, help="the same of the checkpoint it was made of")
    given = parser.parse_args()
    ours, base = (_result(path) for path in (given.ours, given.base))
    result = {
        "ours": ours,
        "base": base,
        "fine_tuning": {task["task"]: _difference(given, task["task"]) for task in ours["tasks"]},
        "published": PUBLISHED,
        "environment": environment(),
    }
    write_json(given.out, result)
    print(f"wrote {given.out}")


def _result(directory: Path) -> dict[str, Any]:
    """Return a run's figures; where model and documents lay is nobody's concern."""
    found = read_json(directory / RESULT_FILE)
    return {name: value for name, value in found.items() if name not in ("model", "data")}


def _difference(given: Any, task: str) -> dict[str, float]:
    """Return the plain accuracy of ours less that of the base, with its standard error.

    Raises:
        SystemExit: they were asked other questions.
    """
    ours, base = (read_json(path / TASKS / f"{task}.json") for path in (given.ours, given.base))
    if ours["chosen"] != base["chosen"]:
        raise SystemExit(f"{task}: the two runs have other questions. Ask both the same.")
    apart = np.subtract(*(of["correct"]["plain"][HEADLINE] for of in (ours, base)))
    return {"value": float(apart.mean()), "stderr": float(apart.std(ddof=1) / len(apart) ** 0.5)}


if __name__ == "__main__":
    main()
