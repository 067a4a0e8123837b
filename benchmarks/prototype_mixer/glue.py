"""Fine-tune models on GLUE, beside the same models without their training.

    python -m benchmarks.prototype_mixer.glue --model llama=DIR --model protot=DIR --data DIR

Every model is fine-tuned on the same rows by the same seeds, with the rate and warm-up of a search
that is made first. Each writes a file of its own, so that the models may be run one by one. With
``--large-limit`` the four tasks of more than 10,000 rows are trained on so many. What was stopped
goes on.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.eval.glue import RATES, SEARCH, GlueModel, GlueOptions, run_glue, search, select_tasks
from prismlm.files import write_json
from prismlm.models.device import device_named

LARGE = ("sst2", "qqp", "qnli", "mnli")
ENTAILMENT = ["entailment", "not_entailment"]
CLASSES = {
    "rte": ENTAILMENT,
    "qnli": ENTAILMENT,
    "mnli": ["entailment", "neutral", "contradiction"],
}


def main() -> None:
    """Fine-tune every model that is named."""
    parser = script_options(__doc__, RESULTS / "prototype_mixer" / "glue")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--data", type=Path, help="TASK_SPLIT.parquet, or the hub's own files")
    parser.add_argument("--large-limit", type=int, help="rows of large tasks that are trained on")
    parser.add_argument("--dev-limit", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--scratch-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--search-limit", type=int, help="rows of a search's run")
    parser.add_argument("--search-rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--work", type=Path, default=Path("glue-runs"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.data is not None and any(args.data.glob("*.parquet")):
        args.data = as_on_the_hub(args.data, args.work / args.data.name)
    for named in args.model:
        name, _, directory = named.partition("=")
        write_json(args.out / f"{name}.json", study_of(name, Path(directory), args))
        print(f"wrote {args.out / name}.json")


def as_on_the_hub(data: Path, out: Path) -> Path:
    """Write TASK_SPLIT.parquet, or TASK_SPLIT_subset.parquet for a part, as the hub has them."""
    for path in sorted(data.glob("*.parquet")):
        task, _, split = path.stem.partition("_")
        whole = split.removesuffix("_subset")
        if (task, whole) == ("mnli", "dev"):
            whole = "dev_matched"
        if split == "test" or (split != whole and (data / f"{task}_{whole}.parquet").is_file()):
            continue
        table = pq.read_table(path)
        names = ["label" if name == "score" else name for name in table.column_names]
        rows = table.rename_columns(names).to_pylist()
        for row in rows:
            if isinstance(row["label"], str):
                known = CLASSES.get(task, ["0", "1"])
                row["label"] = known.index(row["label"])
        part = "_subset" if split.endswith("_subset") else ""
        place = out / task / f"{whole.replace('dev', 'validation')}{part}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), place)
    return out


def study_of(name: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a model, and what its search tried."""
    lm, work = GlueModel(directory, device=device_named("auto")), args.work / name
    short_chunks(lm)
    limits = [one for one in (args.search_limit, args.dev_limit) if one is not None]
    limited = GlueOptions(args.data, args.search_limit, min(limits, default=None))
    tried = search(lm, work, limited, rates=args.search_rates)["tried"]
    parts: list[dict[str, Any]] = []
    for place, tasks, limit in _parts(work, args):
        shutil.copytree(work / SEARCH, place / SEARCH, dirs_exist_ok=True)
        options = GlueOptions(args.data, limit, args.dev_limit)
        run_glue(lm, place, options, tasks, args.seeds)
        parts.append(run_glue(lm, place, options, tasks, args.scratch_seeds, from_scratch=True))
    result = parts[0] | {"tasks": [row for part in parts for row in part["tasks"]]}
    # Where files lie on this machine is nobody's concern.
    result |= {"data": "hub" if args.data is None else args.data.name, "model": name}
    result |= {"parameters": lm.model.num_parameters(), "type": lm.model.config.model_type}
    result |= {"tried": tried, "searched_on": limited.limit}
    return result | {"environment": environment(lm.model.device.type)}


def _parts(work: Path, args: argparse.Namespace) -> list[tuple[Path, list[str], int | None]]:
    """Return where tasks are run, which, and on how many rows: a directory has one limit."""
    asked = [task.name for task in select_tasks(None)]
    small, large = ([name for name in asked if (name in LARGE) == side] for side in (False, True))
    return [(work / "small", small, None), (work / "large", large, args.large_limit)]


def short_chunks(lm: GlueModel) -> None:
    """Have Mamba2 add up most rows as one chunk: the same sums, without states, and faster."""
    for module in (lm.model.config, *lm.model.modules()):
        if hasattr(module, "chunk_size"):
            setattr(module, "chunk_size", 96)  # noqa: B010 - modules are typed as if they had none


if __name__ == "__main__":
    main()
