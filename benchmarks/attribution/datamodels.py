"""LDS of every method on a bank of small models: do scores foretell what retraining does?

    python -m benchmarks.attribution.model_bank planted bank
    python -m benchmarks.attribution.datamodels bank

Each method scores the documents for predictions of the model that was trained on all of them; the
models of the bank say what leaving out half of the documents does. What is free in a method is to
be chosen by ``search``, a seeded half of the predictions, and reported of ``report``, the other.
Scores are kept in ``scores/NAME.npy`` of the bank, [predictions, documents], for another tool.
A figure's ``resampled`` are what it is for predictions and models drawn again, with replacement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attribution.judges.passages import (
    PASSAGE_TOKENS,
    Method,
    Prediction,
    halves,
)
from benchmarks.attribution.judges.retraining import linear_datamodeling
from benchmarks.attribution.methods.baselines import AtRandom, ByWords, NearestStates, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.explain import Explained, temporary_cells, with_random_states
from benchmarks.attribution.methods.gradients import Gradients, LastLayerKFAC
from benchmarks.attribution.methods.setting import Setting, read_positions
from benchmarks.attribution.model_bank import open_bank, read_predictions
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.over_seeds import mean_with_error
from prismlm.explain.attribution import TEMPERATURE
from prismlm.files import read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import LogitMap
from prismlm.training.model import spherical_kmeans

PROTOTYPES, PER_TOKEN, ITERATIONS = 256, 16, 10
TEMPERATURES = (0.02, 0.05, 0.1, 0.2, 0.5)
DRAWS = 200


def main() -> None:
    """Score, and judge the scores."""
    parser = script_options(__doc__, RESULTS / "attribution_datamodels.json")
    parser.add_argument("bank", type=Path, help="the folder that model_bank.py wrote")
    args = parser.parse_args()
    folder = args.bank
    files = sorted((folder / "outputs").glob("*.npy"), key=lambda file: int(file.stem))
    outputs = np.stack([np.load(file) for file in files], 1)
    setting = base_setting(folder)
    subsets = trained_on(folder, len(files), len(setting.bank))
    predictions = read_predictions(folder)
    searched = halves(len(predictions), seed=0)
    results: dict[str, Any] = {}
    for name, make in methods(setting).items():
        scores, seconds = kept_scores(folder / "scores" / f"{name}.npy", make, predictions)
        correlations = linear_datamodeling(scores, subsets, outputs)
        results[name] = {
            "all": mean_with_error(correlations),
            "search": mean_with_error(correlations[searched]),
            "report": mean_with_error(correlations[~searched]),
            "each": np.round(correlations, 6).tolist(),
            "resampled": resampled(scores, subsets, outputs),
            "seconds": seconds,
        }
        print(name, results[name]["all"], seconds, flush=True)
    described = {
        "models": len(files),
        "documents": len(setting.bank),
        "predictions": len(predictions),
        "searched": searched.tolist(),
    }
    write_json(args.out, {"environment": environment(), **described, "methods": results})


def trained_on(folder: Path, models: int, documents: int) -> np.ndarray:
    """Return what each of the first models of a bank was trained on, bool [models, documents]."""
    subsets = np.ones((models, documents), dtype=bool)
    for row, left_out in zip(subsets, read_json(folder / "subsets.json"), strict=False):
        row[left_out] = False
    return subsets


def kept_scores(
    file: Path, make: Callable[[], Method], predictions: Sequence[Prediction]
) -> tuple[np.ndarray, dict[str, float]]:
    """Return a method's scores and the seconds that they took, which lie beside them."""
    if not file.exists():
        begun = time.perf_counter()
        method = make()
        made = time.perf_counter()
        scores = method(predictions)
        asked = time.perf_counter()
        file.parent.mkdir(exist_ok=True)
        np.save(file, scores)
        seconds = {"once": made - begun, "a prediction": (asked - made) / len(predictions)}
        write_json(file.with_suffix(".json"), seconds)
    return np.load(file), read_json(file.with_suffix(".json"))


def resampled(scores: np.ndarray, subsets: np.ndarray, outputs: np.ndarray) -> list[float]:
    """Return the LDS of predictions and models that are drawn again, the same for every method."""
    generator = np.random.default_rng(0)
    predictions, models = outputs.shape
    values: list[float] = []
    for _ in range(DRAWS):
        rows = generator.integers(predictions, size=predictions)
        columns = generator.integers(models, size=models)
        each = linear_datamodeling(scores[rows], subsets[columns], outputs[rows][:, columns])
        values.append(round(float(each.mean()), 6))
    return values


def base_setting(folder: Path) -> Setting:
    """Return the model trained on all documents, with centres of its states as prototypes."""
    model, tokenizer = read_checkpoint(folder / "retrained" / "base")
    bank, logit_map = open_bank(folder), LogitMap.of(model)
    head = PrototypeHead(model.config.hidden_size, PROTOTYPES, PER_TOKEN)
    head.reset_parameters(torch.Generator().manual_seed(0))

    def read() -> Any:
        window = PASSAGE_TOKENS
        return read_positions(model, head, logit_map, bank, window=window, stride=window)

    first = read()
    states = torch.from_numpy(first.state.astype(np.float32))
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))
    states = states[order[: 64 * PROTOTYPES]]
    centres = spherical_kmeans(states, states[:PROTOTYPES], ITERATIONS)
    head.place_on(centres * float(first.size.mean()))
    return Setting(model, tokenizer, head, logit_map, bank, read(), PASSAGE_TOKENS)


def methods(setting: Setting) -> dict[str, Callable[[], Method]]:
    """Return every method, to be made when its turn comes."""
    bank, model = setting.bank, setting.model
    random = with_random_states(setting, seed=0)
    makers: dict[str, Callable[[], Method]] = {
        "random": lambda: AtRandom(bank),
        "bm25": lambda: ByWords(bank),
        "nearest states": lambda: NearestStates(setting),
        "nearest with the same token": lambda: NearestStates(setting, same_token=True),
        "count of the token": lambda: SameToken(setting, counted=True),
        "last-layer K-FAC": lambda: LastLayerKFAC(setting),
        "gradient cosine": lambda: Gradients(model, bank),
        "gradient, diagonal Fisher": lambda: Gradients(
            model, bank, cosine=False, preconditioned=True
        ),
    }
    for kind in ("explain", "alone"):
        makers[f"{kind} T={TEMPERATURE:g}"] = lambda alone=kind == "alone": Explained(
            setting, temporary_cells(setting), alone=alone
        )
    for choices in tried_choices():
        makers[named(choices)] = lambda c=choices: EvidenceByPosition(setting, c)
    for choices in map(Choices, TEMPERATURES):
        name = f"random states T={choices.temperature:g}"
        makers[name] = lambda c=choices: EvidenceByPosition(random, c)
    return makers


def tried_choices() -> list[Choices]:
    """Return what is tried of evidence by position."""
    return [Choices(t, cells=cells) for cells in (16, None) for t in TEMPERATURES]


def named(choices: Choices) -> str:
    """Return a short name of some choices, fit for a file."""
    cells = "all" if choices.cells is None else choices.cells
    return f"evidence T={choices.temperature:g} cells={cells}"


if __name__ == "__main__":
    main()
