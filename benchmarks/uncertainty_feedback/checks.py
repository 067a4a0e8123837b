"""Check whether what `measure.py` trained uses its signal.

    python -m benchmarks.uncertainty_feedback.checks uncertainty-runs
    python -m benchmarks.render uncertainty_feedback

The checks are those of ``prismlm inspect uncertainty-feedback``, done on every model that was
trained with its own codes, on held-out texts of the corpus that it was trained on. Writes one
JSON file per model to docs/results/uncertainty_checks/. A model whose file is there is not
checked again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.signal_noise_attention.measure import LENGTH, slug
from benchmarks.uncertainty_feedback.measure import SWEEP, TRAIN
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    corpus_sample,
    inspect_uncertainty_feedback,
)

TEXTS = 64
# Trained with the codes of its own predictions, so that it may have learned to use them.
FED = [
    name
    for name, feedback in (TRAIN | SWEEP).items()
    if feedback and feedback["passes"] > 1 and "signal" not in feedback
]
Row = dict[str, Any]


def main() -> None:
    """Check every model that has no file yet."""
    parser = script_options(__doc__, RESULTS / "uncertainty_checks")
    parser.add_argument("models", type=Path, help="--work of the training script")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(2)
    for name in FED:
        for seed in args.seeds:
            model = args.models / f"{slug(name)}-{seed}"
            result = args.out / f"{model.name}.json"
            if result.is_file():
                print(f"{result.name} is there")
            elif not (model / "uncertainty_feedback.safetensors").is_file():
                print(f"{model} holds no trained model: train it first")
            else:
                row = {"arm": name, "seed": seed, "report": check(model)}
                write_json(result, row | {"environment": environment()})
                print(f"wrote {result}", flush=True)


def check(directory: Path) -> Row:
    """Return what all checks say of one model."""
    model, tokenizer = read_checkpoint(directory)
    recipe = read_json(directory / "training.json")["recipe"]
    corpus = Corpus.open(Path(recipe["corpus"]))
    sample = corpus_sample(corpus, "heldout", texts=TEXTS, tokens=LENGTH, seed=0)
    options = InspectOptions(passes=2)
    report = inspect_uncertainty_feedback(
        model, tokenizer, sample, name=directory.name, options=options
    )
    return report.to_dict()


if __name__ == "__main__":
    main()
