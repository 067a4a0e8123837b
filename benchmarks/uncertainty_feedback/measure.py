"""Train decoders of a laptop's size with and without uncertainty feedback, on stories.

    python -m benchmarks.signal_noise_attention.measure stories corpus TEXTS.parquet …
    python -m benchmarks.uncertainty_feedback.measure stories train --seed 0        # and 1, 2
    python -m benchmarks.uncertainty_feedback.measure stories levels --seed 0       # and 1, 2
    python -m benchmarks.uncertainty_feedback.measure stories literal --seed 0 \\
        --out docs/results/uncertainty_literal                                      # and 1, 2
    python -m benchmarks.render uncertainty_feedback

Every model sees the same rows in the same order for as many steps, with the same peak rate, and
begins with the weights of the same seed: those of signal/noise attention, so that the runs
without feedback can be compared with the ones there. The control is trained with the table and
the codes of two passes, but permuted over all positions of a batch. ``literal`` trains as the
source's pseudo-code is read literally, with the codes of the batch before, and its control.

One JSON file per run in docs/results/uncertainty_feedback/. A run whose file is there is not run
again, and one that was cut short goes on from its last checkpoint in ``--work``, where the trained
models stay, those of 65,536 levels with 200 MB each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.prototype_mixer.measure import Settings, measure
from benchmarks.shared.options import RESULTS, training_options
from benchmarks.signal_noise_attention.measure import LENGTH, STEPS, on_stories, slug
from benchmarks.uncertainty_feedback.validation import validate
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import uncertainty_of

MODEL: Settings = {"preset": "llama-laptop"}
LEVELS = 65536
# Rows of the tables between whose rows codes are interpolated.
INTERPOLATED = 64


def fed(levels: int = LEVELS, **more: Any) -> Settings:
    """Return the section ``uncertainty_feedback`` of a recipe: two passes, a drawn row a code."""
    drawn = {"rows": None, "deviation": None}
    return {"enabled": True, "levels": levels, "passes": 2} | drawn | more


# Each arm's feedback; None for none.
TRAIN: dict[str, Settings | None] = {
    "no feedback": None,
    "two passes": fed(),
    "shuffled": fed(signal="shuffled"),
    "one pass": fed(passes=1),
}
SWEEP: dict[str, Settings | None] = {
    "65,536 levels, interpolated": fed(rows=INTERPOLATED),
    "interpolated, shuffled": fed(rows=INTERPOLATED, signal="shuffled"),
    "interpolated, from zero": fed(rows=INTERPOLATED, deviation=0.0),
    "interpolated, from zero, shuffled": fed(rows=INTERPOLATED, deviation=0.0, signal="shuffled"),
    "4,096 levels": fed(4096),
    "256 levels": fed(256),
}
LITERAL: dict[str, Settings | None] = {
    "no feedback": None,
    "previous batch": fed(passes=1, signal="previous_batch"),
}
PARTS = {"train": TRAIN, "levels": SWEEP, "literal": LITERAL}


def main() -> None:
    """Make every run of a part that has no result yet."""
    parser = training_options(
        __doc__, PARTS, work="uncertainty-runs", out=RESULTS / "uncertainty_feedback"
    )
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(TRAIN | SWEEP | LITERAL)!r}")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, feedback in PARTS[args.part].items():
        result = args.out / f"{slug(name)}-{args.seed}.json"
        if args.only and name not in args.only:
            continue
        if result.is_file():
            print(f"{result.name} is there")
            continue
        settings = recipe_of(feedback, args.corpus, args.seed, args.steps)
        run(name, settings, args.work / f"{slug(name)}-{args.seed}", result)


def recipe_of(feedback: Settings | None, corpus: Path, seed: int, steps: int = STEPS) -> Settings:
    """Return the recipe of a run, but for where it is written."""
    settings: Settings = {"corpus": str(corpus), "seed": seed, "steps": steps, "model": MODEL}
    more = {"uncertainty_feedback": feedback} if feedback else {}
    return on_stories(settings, LENGTH) | more


def run(name: str, settings: Settings, work: Path, result: Path) -> None:
    """Train, validate by signal, and write the figures."""
    # Kept until the model is validated, so that training is not measured again.
    measured = work.with_name(f"{work.name}.json")
    measure({"arm": name}, settings, work, measured)
    row = read_json(measured)
    model, _ = read_checkpoint(work)
    if (feedback := uncertainty_of(model)) is not None:
        # The table is counted by itself.
        row["table"] = {"parameters": feedback.embedding.weight.numel()}
        row["parameters"] -= row["table"]["parameters"]
    row["validation"] = validate(model, Corpus.open(Path(settings["corpus"])), LENGTH)
    write_json(result, row)
    losses = row["validation"]["all"]["losses"]
    print(f"{result.name}: {', '.join(f'{k} {v:.4f}' for k, v in losses.items())}", flush=True)


if __name__ == "__main__":
    main()
