"""Fine-tune models on GLUE, beside the same models without their training.

    python -m benchmarks.prototype_mixer.glue --model llama=DIR --model protot=DIR --data DIR

Every model is fine-tuned on the same rows by the same seeds, with the rate and warm-up that
``--search`` found for it, which is made first, or with ``--learning-rate``. Each writes a file of
its own, so that the models may be run one by one. What was stopped goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.prototype_mixer.mamba2_scan import shared_scans
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
from prismlm.eval.glue.study import run_glue, search
from prismlm.files import write_json
from prismlm.models.device import device_named


def main() -> None:
    """Fine-tune every model that is named."""
    parser = script_options(__doc__, RESULTS / "prototype_mixer" / "glue")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--data", type=Path, help="Parquet files of the tasks; else the hub")
    parser.add_argument("--tasks", nargs="*", help="else all nine")
    parser.add_argument("--limit", type=int, help="rows trained on")
    parser.add_argument("--dev-limit", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--search-limit", type=int, help="rows of a run of the search")
    parser.add_argument("--learning-rate", type=float, help="of all models, in place of a search")
    parser.add_argument("--work", type=Path, default=Path("glue-runs"))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for named in given.model:
        name, _, directory = named.partition("=")
        with shared_scans():
            study = study_of(name, Path(directory), given)
        write_json(given.out / f"{name}.json", study)
        print(f"wrote {given.out / name}.json")


def study_of(name: str, directory: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a model, and what its search tried."""
    lm, work = GlueModel(directory, device=device_named("auto")), given.work / name
    short_chunks(lm)
    tried: list[dict[str, Any]] = []
    if given.learning_rate is None:
        limited = GlueOptions(given.data, given.search_limit, given.dev_limit)
        tried = search(lm, work, limited)["tried"]
    options = GlueOptions(given.data, given.limit, given.dev_limit, given.learning_rate, test=False)
    result = run_glue(lm, work, options, given.tasks, given.seeds, from_scratch=True)
    counted = {"parameters": lm.model.num_parameters(), "type": lm.model.config.model_type}
    # Where files lie on this machine is nobody's concern.
    result |= {"data": "hub" if given.data is None else given.data.name, "model": name}
    return result | counted | {"tried": tried, "environment": environment(lm.model.device.type)}


def short_chunks(lm: GlueModel) -> None:
    """Have Mamba2 add up chunks of 16 tokens: the same sums, and for short rows the fastest."""
    for module in (lm.model.config, *lm.model.modules()):
        if hasattr(module, "chunk_size"):
            setattr(module, "chunk_size", 16)  # noqa: B010 - modules are typed as if they had none


if __name__ == "__main__":
    main()
