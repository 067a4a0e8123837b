"""Forgetting: what do predictions lose when the ten documents that a method names are not there?

    python -m benchmarks.attribution.datamodels bank
    python -m benchmarks.attribution.forgetting bank

Models are trained from scratch without them, in three seeds, a few predictions to a model: each
then loses what was named for the others too, by every method alike. Every training is kept in
``forgetting/`` of the bank by what was left out, so that a stopped run goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PassageBank, Prediction, best
from benchmarks.attribution.judges.retraining import forgetting
from benchmarks.attribution.model_bank import (
    SmallTraining,
    log_probabilities,
    open_bank,
    read_predictions,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.over_seeds import mean_with_error
from prismlm.explain.attribution import TEMPERATURE
from prismlm.files import write_json

NAMED, SEEDS = 10, (0, 1, 2)
METHODS = (f"explain T={TEMPERATURE:g}", "bm25", "random", "evidence T=0.2 cells=16")
Training = Callable[[PassageBank, np.ndarray, int], PreTrainedModel]
"""A bank, rows of it and a seed to the model that is trained on them."""


def main() -> None:
    """Retrain without what each method names."""
    parser = script_options(__doc__, RESULTS / "attribution_forgetting.json")
    parser.add_argument("bank", type=Path, help="the folder that model_bank.py wrote")
    parser.add_argument("--predictions", type=int, default=20)
    parser.add_argument("--together", type=int, default=5, help="predictions that share a training")
    args = parser.parse_args()
    bank = open_bank(args.bank)
    every = read_predictions(args.bank)
    asked = every[: args.predictions]
    train = kept_trainings(args.bank / "forgetting", bank, every, SmallTraining().train)
    results: dict[str, Any] = {}
    for name in METHODS:
        scores = np.load(args.bank / "scores" / f"{name}.npy")[: len(asked)]
        named, together = best(scores, NAMED), args.together
        lost = forgetting(train, len(bank), asked, named, SEEDS, together=together)
        results[name] = {"lost": mean_with_error(lost.mean(1)), "each": lost.tolist()}
        print(name, results[name]["lost"], flush=True)
    described = {
        "predictions": len(asked),
        "together": args.together,
        "seeds": SEEDS,
        "documents": len(bank),
    }
    write_json(args.out, {"environment": environment(), **described, "methods": results})


def kept_file(folder: Path, documents: np.ndarray, seed: int) -> Path:
    """Return where the answers of a training on these documents are kept."""
    digest = hashlib.sha256(documents.astype(np.int64).tobytes()).hexdigest()[:16]
    return folder / f"{digest}-{seed}.npy"


def kept_trainings(
    folder: Path, bank: PassageBank, asked: Sequence[Prediction], made: Training
) -> Callable[[np.ndarray, int], Callable[[Sequence[Prediction]], np.ndarray]]:
    """Return a training whose answers are kept on disk, to all that may be ``asked``."""
    folder.mkdir(exist_ok=True)
    row_of = {id(prediction): row for row, prediction in enumerate(asked)}

    def train(documents: np.ndarray, seed: int) -> Callable[[Sequence[Prediction]], np.ndarray]:
        file = kept_file(folder, documents, seed)
        if not file.exists():
            np.save(file, log_probabilities(made(bank, documents, seed), asked))
        answers = np.load(file)
        return lambda predictions: np.array([answers[row_of[id(p)]] for p in predictions])

    return train


if __name__ == "__main__":
    main()
