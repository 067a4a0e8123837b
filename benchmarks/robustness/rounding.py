"""How far rounding alone moves the states of a lens's probe: what its bounds are measured by.

    python -m benchmarks.robustness.rounding DIR…

reads models in DIR/model and their corpora in DIR/corpus, as ``prismlm demo`` writes them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.files import write_json
from prismlm.lens.probe import HALF, SINGLE, Probe
from prismlm.models.checkpoint import read_checkpoint

WINDOW = 256


def measure(directory: Path) -> list[dict[str, Any]]:
    """Return the median and the largest difference of each way to compute the same."""
    model, _ = read_checkpoint(directory / "model")
    probe = Probe.measure(model, Corpus.open(directory / "corpus"), "train", WINDOW)
    kept = {"model": directory.name, "parameters": sum(one.numel() for one in model.parameters())}
    alone = [replace(probe, rows=[row], **_part(probe, n)) for n, row in enumerate(probe.rows)]
    differences = {"each row by itself": torch.cat([one.differences(model)[0] for one in alone])}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        copied: Any = copy.deepcopy(model)
        differences[f"a copy in {name}"] = probe.differences(copied.to(dtype))[0]
    return [
        kept | {"how": how, "median": one.median().item(), "most": one.max().item()}
        for how, one in differences.items()
    ]


def _part(probe: Probe, row: int) -> dict[str, torch.Tensor]:
    each = len(probe.states) // len(probe.rows)
    part = slice(row * each, (row + 1) * each)
    return {"states": probe.states[part], "logits": probe.logits[part]}


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "robustness_rounding.json")
    parser.add_argument("directories", type=Path, nargs="+")
    args = parser.parse_args()
    rows = [row for directory in args.directories for row in measure(directory)]
    bounds = {"float32": SINGLE, "half precision": HALF}
    result = {"environment": environment(), "bounds": bounds, "rows": rows}
    write_json(args.out, result)


if __name__ == "__main__":
    main()
