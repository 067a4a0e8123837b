"""LDS and QLD by the tool Bergson, of our scores and of its own methods, on one bank of models.

    python -m benchmarks.attribution.datamodels bank
    pip install --no-deps --target bergson-site bergson==2.5.1 ml_dtypes natsort peft petname \\
        simple-parsing docstring-parser torchopt optree graphviz
    PYTHONPATH=bergson-site python -m benchmarks.attribution.judged_by_bergson bank

Its LDS is the mean over predictions of the Spearman, over models, of the summed scores of what a
model was trained *without* and its loss. Without a ``score_cfg`` beside them it reads the lowest
score as the most responsible, so ours are negated.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.model_bank import SmallTraining
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.over_seeds import mean_with_error
from prismlm.explain.attribution import TEMPERATURE
from prismlm.files import read_json, write_json

VERSION = "2.5.1"
OURS = (f"explain T={TEMPERATURE:g}", "bm25")
OWN = ("Bergson EK-FAC", "Bergson TrackStar", "Bergson gradient cosine")
# What lies there is ready before the first prediction is asked.
PREPARED = {"Bergson EK-FAC": "hessian", "Bergson TrackStar": "mixed_hessian"}


def main() -> None:
    """Score with its methods, and have all scores judged."""
    parser = script_options(__doc__, RESULTS / "attribution_bergson.json")
    parser.add_argument("bank", type=Path, help="the folder that model_bank.py wrote")
    args = parser.parse_args()
    judge = Judge(args.bank.resolve())
    results: dict[str, dict[str, Any]] = {}
    for name in (*OWN, *OURS):
        results[name] = judge.score(name) if name in OWN else judge.hand_over(name)
        each = judge.datamodeling(name)
        results[name]["lds"] = mean_with_error(each) | {"each": np.round(each, 6).tolist()}
        print(name, results[name], flush=True)
    result = {
        "environment": environment(),
        "bergson": VERSION,
        "models": judge.models,
        "predictions": judge.predictions,
        "methods": results,
    }
    write_json(args.out, result)


class Judge:
    """Bergson, run as a program on the folder of a bank."""

    def __init__(self, bank: Path) -> None:
        self.bank, self.work = bank, bank / "bergson"
        self.work.mkdir(exist_ok=True)
        self.data = {"dataset": str(bank / "documents.jsonl"), "split": "train"}
        self.query = {"dataset": str(bank / "queries.jsonl"), "split": "train"}
        # How many models of the bank are there, and predictions that are asked of each.
        self.models = len(list((bank / "outputs").glob("*.npy")))
        self.predictions = len((bank / "queries.jsonl").read_text().splitlines())

    def score(self, name: str) -> dict[str, dict[str, float]]:
        """Have it score the documents by a method of its own; return the seconds it took.

        Those until its second moments are there are for all predictions together.
        """
        index = {
            "model": str(self.bank / "retrained" / "base"),
            "overwrite": True,
            "token_batch_size": 512,
            "max_batch_size": 64,
            "filter_modules": "lm_head",
            "data": self.data,
        }
        noted = self.work / name / "seconds.json"
        if not noted.exists():
            seconds = timed(name, self.work, index, self.query)
            seconds["a prediction"] /= self.predictions
            write_json(noted, {"seconds": seconds})
        return read_json(noted)

    def hand_over(self, name: str) -> dict[str, dict[str, float]]:
        """Write our scores as it reads them; return the seconds that were noted beside them."""
        from bergson.score.score_writer import (  # pyright: ignore[reportMissingImports]
            save_sequence_scores,
        )

        scores = np.load(self.bank / "scores" / f"{name}.npy")
        save_sequence_scores(self.work / name / "scores", -scores.T.astype(np.float32))
        return {"seconds": read_json(self.bank / "scores" / f"{name}.json")}

    def datamodeling(self, name: str) -> np.ndarray:
        """Return what LDS is the mean of, over the models of the bank: [predictions]."""
        # It reads as many models as there are subsets.
        there = self.work / "models"
        there.mkdir(exist_ok=True)
        subsets = read_json(self.bank / "subsets.json")[: self.models]
        (there / "subsets.json").write_text(json.dumps(subsets))
        if not (there / "retrained").exists():
            (there / "retrained").symlink_to(self.bank / "retrained")
        training = SmallTraining()
        out = self.work / name / "lds"
        base = self.bank / "retrained" / "base"
        step = {
            "run_path": str(out),
            "model": str(base),
            # Not trained again: what is subtracted from every loss alike says nothing.
            "baseline_model": str(base),
            "overwrite": True,
            "scores": str(self.work / name / "scores"),
            "data": self.data,
            "query": self.query | {"aggregation": "none"},
            "method": {"kind": "lds", "subsets": "bank", "paths": [str(there)]},
            "batch_size": training.rows,
            "num_epochs": training.epochs,
            "lr_schedule": {
                "lr": training.learning_rate,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 0.05,
            },
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "wandb_project": "",
        }
        run(self.work, f"{name} lds", [{"validate": step}])
        with (out / "summary.csv").open() as lines:
            return np.array([float(row["spearman_corr"]) for row in csv.DictReader(lines)])


def run(work: Path, name: str, steps: list[dict[str, Any]]) -> None:
    """Run some steps; JSON is YAML too."""
    file = work / f"{name}.yaml"
    settings = {"run_path": str(work / f"{name} steps"), "steps": steps}
    file.write_text(json.dumps(settings, indent=2))
    with (work / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "bergson", str(file)]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def timed(name: str, work: Path, index: dict[str, Any], query: dict[str, Any]) -> dict[str, float]:
    """Run one of its own methods; return the seconds it took once and for all predictions."""
    folder, begun = work / name, time.time()
    run(work, name, own_steps(name, folder, index, query))
    taken = time.time() - begun
    prepared = (folder / PREPARED[name]).rglob("*") if name in PREPARED else ()
    once = max((file.stat().st_mtime - begun for file in prepared), default=0.0)
    return {"once": once, "a prediction": taken - once}


def own_steps(
    name: str, folder: Path, index: dict[str, Any], query: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the steps of one of its own methods; scores come to lie in ``folder/scores``."""
    each = query | {"aggregation": "none"}
    scoring = {"batch_size": 1024}
    if name == "Bergson EK-FAC":
        step = {
            "index_cfg": index | {"run_path": str(folder)},
            "hessian_cfg": {"method": "kfac", "ev_correction": True},
            "score_cfg": scoring,
            "preprocess_cfg": {"unit_normalize": False},
            "hessian_pipeline_cfg": {"query": each, "inversion_cfg": {"damping_factor": 0.1}},
        }
        return [{"ekfac": step}]
    normalised = {"preprocess_cfg": {"unit_normalize": True}}
    if name == "Bergson TrackStar":
        step = {
            "index_cfg": index | {"run_path": str(folder), "projection_dim": 32},
            "trackstar_cfg": {"query": each, "score_cfg": scoring, **normalised},
        }
        return [{"trackstar": step}]
    built = str(folder / "query")
    build = {"index_cfg": index | {"run_path": built, "data": query}, **normalised}
    score = {
        "score_cfg": scoring | {"query_path": built},
        "index_cfg": index | {"run_path": str(folder / "scores")},
        **normalised,
    }
    return [{"build": build}, {"score": score}]


if __name__ == "__main__":
    main()
