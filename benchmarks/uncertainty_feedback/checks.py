"""Check whether what `measure.py` trained uses its signal.

    python -m benchmarks.uncertainty_feedback.checks uncertainty-runs
    python -m benchmarks.uncertainty_feedback.render

The checks are those of ``prismlm inspect uncertainty-feedback``, done on every model that was
trained with its own codes, on held-out texts of the corpus that it was trained on. Writes one
JSON file per model to docs/results/uncertainty_checks/. A model whose file is there is not
checked again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.pages import ranged, table_head
from benchmarks.uncertainty_feedback.measure import LENGTH, SWEEP, TRAIN, slug
from prismlm.corpus import Corpus
from prismlm.files import write_json
from prismlm.instruments.uncertainty_feedback import (
    InspectOptions,
    Signal,
    corpus_sample,
    inspect_uncertainty_feedback,
)
from prismlm.models.checkpoint import read_checkpoint

SIGNIFICANT = 0.05
TEXTS = 64
# Trained with the codes of its own predictions, so that it may have learned to use them.
FED = [
    name
    for name, arm in (TRAIN | SWEEP).items()
    if arm.uncertainty_feedback
    and arm.uncertainty_feedback["passes"] > 1
    and "signal" not in arm.uncertainty_feedback
]
Row = dict[str, Any]


def main() -> None:
    """Check every model that has no file yet."""
    parser = script_options(__doc__, RESULTS / "uncertainty_checks")
    parser.add_argument("models", type=Path, help="--work of the training script")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in FED:
        for seed in given.seeds:
            model = given.models / f"{slug(name)}-{seed}"
            result = given.out / f"{model.name}.json"
            if result.is_file():
                print(f"{result.name} is there")
            elif not (model / "uncertainty_feedback.safetensors").is_file():
                print(f"{model} holds no trained model: train it first")
            else:
                row = {"arm": name, "seed": seed, "report": check(model, given.texts)}
                write_json(result, row | {"environment": environment()})
                print(f"wrote {result}", flush=True)


def check(directory: Path, texts: int) -> Row:
    """Return what all checks say of one model."""
    model, tokenizer = read_checkpoint(directory)
    recipe = json.loads((directory / "training.json").read_text(encoding="utf-8"))["recipe"]
    corpus = Corpus.open(Path(recipe["corpus"]))
    sample = corpus_sample(corpus, "heldout", texts=texts, tokens=LENGTH, seed=0)
    options = InspectOptions(signal=Signal("passes", 2))
    report = inspect_uncertainty_feedback(
        model, tokenizer, sample, name=directory.name, options=options
    )
    return report.to_dict()


def rendered(rows: list[Row]) -> list[str]:
    """Return the page's section: each check's answer by model and seed, beside its control."""
    if not rows:
        return []
    first = rows[0]["report"]
    lines = [
        "## Do trained models do what the source expects of them?",
        "",
        f"`prismlm inspect uncertainty-feedback` on {first['texts']} texts of {first['sample']}, "
        f"{first['tokens']:,} tokens, for {len(rows)} of the models trained with their own codes, "
        "by seed below. In brackets 95 % intervals over texts; *yes* takes one on the right side "
        "of 0. What each is measured against: *ablation*, the loss with shuffled codes less that "
        "with the own, nats a token; "
        "*attention*, the rank correlation of code and attention received, among texts at the "
        "same position, in the later layer where it is largest, less the same where nothing is "
        "fed; *hedging*, hedging words a token after high less after low entropy, less the same "
        "without feedback (*yes* takes shuffled codes beaten too); *recovery*, the loss after a "
        "planted wrong token with the own codes "
        "less that with shuffled ones, nats (below 0 helps; *yes* takes no signal beaten too); "
        "*probe*, R² of the code read from hidden states where it is read best, less that where "
        "nothing is fed, and the depth (the source expects 0.67).",
        "",
        *table_head("| check | trained with | yes in | by seed |"),
    ]
    arms = {row["arm"]: [r for r in rows if r["arm"] == row["arm"]] for row in rows}
    order = [name for name in FED if name in arms]
    for title, answer in ANSWERS.items():
        for arm in order:
            found = [answer(row["report"]) for row in arms[arm]]
            yes = sum(good for good, _ in found)
            seeds = f"{yes} of {len(found)}"
            lines.append(f"| {title} | {arm} | {seeds} | {'; '.join(t for _, t in found)} |")
    return [*lines, ""]


def _interval(found: Row | None, form: str = "+.4f") -> str:
    if found is None or found["value"] is None:
        return "nothing to compare"
    return ranged(found, "value", form)


def _above(found: Row | None) -> bool:
    return found is not None and found["low"] is not None and found["low"] > 0


def _below(found: Row | None) -> bool:
    return found is not None and found["high"] is not None and found["high"] < 0


def _ablation(report: Row) -> tuple[bool, str]:
    conditions = {one["signal"]: one for one in report["ablation"]["rows"]}
    change = conditions["shuffled"]["change"]
    return _above(change), _interval(change)


def _attention(report: Row) -> tuple[bool, str]:
    if report["attention"] is None:
        return False, f"not done: {report['left_out']['attention']}"
    layers = report["attention"]["rows"]
    later = layers[len(layers) // 2 :]
    best = max(later, key=lambda one: one["correlation"])
    more = (one for one in later if one["correlation"] > 0 and one["q"] <= SIGNIFICANT)
    return any(_above(one["added"]) for one in more), (
        f"ρ {best['correlation']:+.3f} in layer {best['layer']}, {_interval(best['added'], '+.3f')}"
    )


def _hedging(report: Row) -> tuple[bool, str]:
    own, none, shuffled = report["hedging"]["rows"]
    both = _above(none.get("own_less")) and _above(shuffled.get("own_less"))
    return both, f"{_interval(none.get('own_less'))}, {own['hedges'] + none['hedges']} words"


def _recovery(report: Row) -> tuple[bool, str]:
    _, zero, shuffled = (row.get("own_loss_less") for row in report["mistakes"]["rows"])
    return _below(zero) and _below(shuffled), _interval(shuffled, "+.3f")


def _probe(report: Row) -> tuple[bool, str]:
    layers = [one for one in report["probe"]["rows"] if one["code"]["value"] is not None]
    if not layers:
        return False, "nothing to compare"
    best = max(layers, key=lambda one: one["code"]["value"])
    read = f"R² {best['code']['value']:.3f} at depth {best['depth']:.2f}"
    return _above(best["added"]) and _above(best["code"]), (
        f"{read}, {_interval(best['added'], '+.3f')}"
    )


ANSWERS = {
    "ablation": _ablation,
    "attention": _attention,
    "hedging": _hedging,
    "recovery": _recovery,
    "probe": _probe,
}


if __name__ == "__main__":
    main()
