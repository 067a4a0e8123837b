"""LDS and QLD by the tool Bergson, of our scores and of its own methods, on one bank of models.

    python -m benchmarks.attribution.datamodels bank
    pip install --no-deps --target bergson-site bergson==2.5.1 ml_dtypes natsort peft petname \\
        simple-parsing docstring-parser torchopt optree graphviz
    PYTHONPATH=bergson-site python -m benchmarks.attribution.judged_by_bergson bank

Its LDS is the mean over predictions of the Spearman, over models, of the summed scores of what a
model was trained *without* and its loss; its QLD trains once more for each prediction without the
1 % of documents that score highest, and compares the loss with that of random removals. Without a
``score_cfg`` beside them it reads the lowest score as the most responsible, so ours are negated.
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
import torch

from benchmarks.attribution.model_bank import open_bank
from benchmarks.attribution.small_models import SmallTraining
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json
from prismlm.models.presets import build_config, build_model

VERSION = "2.5.1"
OWN = ("Bergson EK-FAC", "Bergson TrackStar", "Bergson gradient cosine")


def main() -> None:
    """Score with its methods, and have all scores judged."""
    parser = script_options(__doc__, RESULTS / "attribution_bergson.json")
    parser.add_argument("bank", type=Path, help="the folder that model_bank.py wrote")
    parser.add_argument("--own", nargs="*", choices=OWN, default=OWN, help="methods of its own")
    parser.add_argument("--ours", nargs="+", default=[], help="files of scores/, without .npy")
    parser.add_argument("--qld", type=int, default=0, help="predictions to retrain for; 0: no QLD")
    arguments = parser.parse_args()
    judge = Judge(arguments.bank.resolve())
    results: dict[str, dict[str, Any]] = {}
    for name in [*arguments.own, *arguments.ours]:
        seconds = judge.score(name) if name in OWN else judge.hand_over(name)
        results[name] = {"lds": judge.datamodeling(name), **seconds}
        if arguments.qld:
            results[name]["qld"] = judge.removal(name, arguments.qld)
        print(name, results[name], flush=True)
    write_json(
        arguments.out, {"environment": environment(), "bergson": VERSION, "methods": results}
    )


class Judge:
    """Bergson, run as a program on the folder of a bank."""

    def __init__(self, bank: Path) -> None:
        self.bank, self.work = bank, bank / "bergson"
        self.work.mkdir(exist_ok=True)
        self.data = {"dataset": str(bank / "documents.jsonl"), "split": "train"}
        self.query = {"dataset": str(bank / "queries.jsonl"), "split": "train"}

    def score(self, name: str) -> dict[str, float]:
        """Have it score the documents by a method of its own; return the seconds it took."""
        index = {
            "model": str(self.bank / "retrained" / "base"),
            "overwrite": True,
            "token_batch_size": 512,
            "max_batch_size": 64,
            "filter_modules": "lm_head",
            "data": self.data,
        }
        folder = self.work / name
        noted = folder / "seconds.json"
        if not noted.exists():
            begun = time.perf_counter()
            self._run(name, own_steps(name, folder, index, self.query))
            write_json(noted, {"seconds": time.perf_counter() - begun})
        return json.loads(noted.read_text())

    def hand_over(self, name: str) -> dict[str, float]:
        """Write our scores as it reads them."""
        from bergson.score.score_writer import (  # pyright: ignore[reportMissingImports]
            save_sequence_scores,
        )

        scores = np.load(self.bank / "scores" / f"{name}.npy")
        save_sequence_scores(self.work / name / "scores", -scores.T.astype(np.float32))
        return {}

    def datamodeling(self, name: str) -> float:
        """Return the LDS of the scores under a name, over the models of the bank."""
        method = {"kind": "lds", "subsets": "bank", "paths": [str(self.bank)]}
        out = self._validate(name, "lds", method, self.query)
        rows = _rows(out / "summary.csv")
        return float(np.mean([float(row["spearman_corr"]) for row in rows]))

    def removal(self, name: str, predictions: int) -> float:
        """Return the QLD: mean rise of the loss without the best 1 %, less that at random."""
        if not (self.work / "untrained").exists():
            self._untrained()
        method = {
            "kind": "filter",
            "direction": "proponents",
            "fraction": 0.01,
            "controls": {"kind": "retrain", "count": 3},
        }
        query = self.query | {"split": f"train[:{predictions}]"}
        scores = self._first(name, predictions)
        out = self._validate(scores, "qld", method, query)
        rows = _rows(out / "filter_summary.csv")
        return float(
            np.mean([float(row["filter_change"]) - float(row["random_mean"]) for row in rows])
        )

    def _first(self, name: str, predictions: int) -> str:
        """Keep the scores of the first predictions alone, and return what they lie under."""
        from bergson.data import load_scores_loss_signed  # pyright: ignore[reportMissingImports]
        from bergson.score.score_writer import (  # pyright: ignore[reportMissingImports]
            save_sequence_scores,
        )

        scores, _ = load_scores_loss_signed(str(self.work / name / "scores"))
        kept = f"{name}, first {predictions}"
        save_sequence_scores(self.work / kept / "scores", scores[:, :predictions].float().numpy())
        return kept

    def _untrained(self) -> None:
        corpus = open_bank(self.bank).corpus
        torch.manual_seed(0)
        preset = {"preset": SmallTraining().preset}
        model = build_model(build_config(preset, len(corpus.tokenizer), corpus.eos_token_id))
        model.save_pretrained(self.work / "untrained")
        corpus.tokenizer.save_pretrained(self.work / "untrained")

    def _validate(
        self, name: str, judged: str, method: dict[str, Any], query: dict[str, Any]
    ) -> Path:
        training = SmallTraining()
        out = self.work / name / judged
        model = self.bank / "retrained" / "base" if judged == "lds" else self.work / "untrained"
        step = {
            "run_path": str(out),
            "model": str(model),
            "overwrite": True,
            "scores": str(self.work / name / "scores"),
            "data": self.data,
            "query": query | {"aggregation": "none"},
            "method": method,
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
        self._run(f"{name} {judged}", [{"validate": step}])
        return out

    def _run(self, name: str, steps: list[dict[str, Any]]) -> None:
        """Run some steps; JSON is YAML too."""
        file = self.work / f"{name}.yaml"
        settings = {"run_path": str(self.work / f"{name} steps"), "steps": steps}
        file.write_text(json.dumps(settings, indent=2))
        with (self.work / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "bergson", str(file)]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def own_steps(
    name: str, folder: Path, index: dict[str, Any], query: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the steps of one of its own methods; scores come to lie in ``folder/scores``."""
    each = query | {"aggregation": "none"}
    if name == "Bergson EK-FAC":
        return [
            {
                "ekfac": {
                    "index_cfg": index | {"run_path": str(folder)},
                    "hessian_cfg": {"method": "kfac", "ev_correction": True},
                    "score_cfg": {"batch_size": 1024},
                    "preprocess_cfg": {"unit_normalize": False},
                    "hessian_pipeline_cfg": {
                        "query": each,
                        "inversion_cfg": {"damping_factor": 0.1},
                    },
                }
            }
        ]
    if name == "Bergson TrackStar":
        return [
            {
                "trackstar": {
                    "index_cfg": index | {"run_path": str(folder), "projection_dim": 32},
                    "trackstar_cfg": {
                        "query": each,
                        "preprocess_cfg": {"unit_normalize": True},
                        "score_cfg": {"batch_size": 1024},
                    },
                }
            }
        ]
    built = str(folder / "query")
    return [
        {
            "build": {
                "index_cfg": index | {"run_path": built, "data": query},
                "preprocess_cfg": {"unit_normalize": True},
            }
        },
        {
            "score": {
                "score_cfg": {"query_path": built, "batch_size": 1024},
                "index_cfg": index | {"run_path": str(folder / "scores")},
                "preprocess_cfg": {"unit_normalize": True},
            }
        },
    ]


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


if __name__ == "__main__":
    main()
