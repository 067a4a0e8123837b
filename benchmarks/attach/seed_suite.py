"""PRISM's eight tasks, asked of the demo's model, of its parts, and of the model it was made of.

    prismlm eval prismlm-demo/model --data DIR --limit 100 --out OURS
    prismlm eval SMOLLM2 --data DIR --limit 100 --out BASE
    python -m benchmarks.attach.seed_suite OURS --base BASE
    python -m benchmarks.attach.render_seed_suite

Puts what the first two wrote into one JSON file, with differences question by question. Both have
to have asked the same questions.
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

Figure = dict[str, float]
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
    parser.add_argument("--base", type=Path, help="the same of the checkpoint it was made of")
    given = parser.parse_args()
    ours = _result(given.ours)
    tasks = [task["task"] for task in ours["tasks"]]
    result = {
        "ours": ours,
        "base": None if given.base is None else _result(given.base),
        "differences": differences(given.ours, given.base, tasks),
        "published": PUBLISHED,
        "environment": environment(),
    }
    write_json(given.out, result)
    print(f"wrote {given.out}")


def _result(directory: Path) -> dict[str, Any]:
    """Return a run's figures; where model and documents lay is nobody's concern."""
    found = read_json(directory / RESULT_FILE)
    return {name: value for name, value in found.items() if name not in ("model", "data")}


def differences(ours: Path, base: Path | None, tasks: list[str]) -> dict[str, dict[str, Figure]]:
    """Return the residual's accuracy less the prototypes', and what fine-tuning changed, by task.

    Of the parts of one model, and of plain accuracies where there is a base; errors are of the
    differences question by question. Beside the tasks stands their mean, each counting alike.

    Raises:
        SystemExit: the two runs have other questions.
    """
    found: dict[str, dict[str, Figure]] = {"residual_less_prototypes": {}}
    if base is not None:
        found["fine_tuning"] = {}
    for task in tasks:
        one = read_json(ours / TASKS / f"{task}.json")
        parts = (one["correct"][name][HEADLINE] for name in ("residual_only", "prototype_only"))
        found["residual_less_prototypes"][task] = _apart(*parts)
        if base is None:
            continue
        other = read_json(base / TASKS / f"{task}.json")
        if one["chosen"] != other["chosen"]:
            raise SystemExit(f"{task}: the two runs have other questions. Ask both the same.")
        plain = (of["correct"]["plain"][HEADLINE] for of in (one, other))
        found["fine_tuning"][task] = _apart(*plain)
    for of in found.values():
        values, errors = ([figure[name] for figure in of.values()] for name in ("value", "stderr"))
        of["mean"] = {
            "value": float(np.mean(values)),
            "stderr": float(np.sqrt(np.square(errors).sum()) / len(errors)),
        }
    return found


def _apart(ours: list[int], others: list[int]) -> Figure:
    apart = np.subtract(ours, others)
    return {"value": float(apart.mean()), "stderr": float(apart.std(ddof=1) / len(apart) ** 0.5)}


if __name__ == "__main__":
    main()
