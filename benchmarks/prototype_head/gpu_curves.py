"""Add a run of ``prism_gpu.sh`` to a JSON file: its held-out cross-entropies so far.

    python -m benchmarks.prototype_head.gpu_curves FILE NAME MODEL SECONDS

A run of several calls has the seconds of each. Runs on another corpus or of another length go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.render import parsed
from benchmarks.shared.environment import environment
from benchmarks.shared.options import script_options
from prismlm.files import read_json, write_json


def main() -> None:
    """Add what one call gave."""
    parser = script_options(__doc__)
    for name, kind in {"file": Path, "name": str, "model": Path, "seconds": int}.items():
        parser.add_argument(name, type=kind)
    args = parser.parse_args()
    path, now = args.file, measured(args.model)
    before = read_json(path)["models"] if path.is_file() else {}
    models = {n: m for n, m in before.items() if all(m[k] == now[k] for k in ("corpus", "tokens"))}
    calls = models.get(args.name, {"calls": []})["calls"]
    now["calls"] = [*calls, {"seconds": args.seconds, "to_step": now.pop("step")}]
    write_json(path, {"models": models | {args.name: now}})


def measured(model: Path) -> dict[str, Any]:
    """Return a run's curve, and its figures at the end if it has come to it."""
    run, history = read_json(model / "training.json"), parsed(model / "training.jsonl")
    recipe, meta = run["recipe"], model / "prismlm.json"
    a_step = recipe["batch_size"] * recipe["gradient_accumulation"] * recipe["data"]["length"]
    # A model without a head has no such file.
    end = {"ce": history[-1]["final_ce"]} if "final_ce" in history[-1] else None
    quality = read_json(meta)["provenance"]["quality"] if end and meta.is_file() else end
    points = [(row["step"], "eval_", row) for row in history if "eval_ce" in row]
    # The last step is not evaluated before the end of the run.
    points += [(recipe["steps"], "", quality)] if quality else []
    keys = ("ce", "prototype_only_ce") if recipe["head"]["enabled"] else ("ce",)
    return {
        "corpus": run["corpus"]["fingerprint"],
        "tokens": recipe["steps"] * a_step,
        "step": history[-1]["step"],
        "passes": round(history[-1]["epoch"], 2),
        "curve": [
            {"tokens": step * a_step} | {key: row.get(prefix + key) for key in keys}
            for step, prefix, row in points
        ],
        "quality": quality,
        "settings": {key: recipe[key] for key in recipe if key not in ("corpus", "out")},
        "environment": environment(run["resolved"]["device"]),
    }


if __name__ == "__main__":
    main()
