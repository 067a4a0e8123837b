"""The judges of ``smollm2_facts.py``: recall, tail-patch, forgetting."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from benchmarks.attribution.forgetting import kept_trainings
from benchmarks.attribution.judge_planted import NAMED, recalled
from benchmarks.attribution.judges.passages import answer_scores, best, mean_with_error
from benchmarks.attribution.judges.retraining import forgetting
from benchmarks.attribution.judges.tail_patch import tail_patch
from benchmarks.attribution.questions import fact_questions, held_out_predictions
from benchmarks.attribution.smollm2_setting import (
    TAUGHT,
    first_tokens,
    methods_of,
    setting_of,
    teaching_of,
)
from prismlm.files import read_json
from prismlm.training.parallel import blocks
from prismlm.training.tuning import LoraOptions

RATE_OF_STEP = 0.05
RECALL = (
    "explain",
    "random",
    "alone",
    "random states",
    "shuffled cells",
    "BM25",
    "BM25, last 16 tokens",
    "nearest states",
    "same token at random",
    "count of the token",
    "same token, nearest",
)
PATCH = ("explain", "random", "BM25", "nearest states", "count of the token")
FORGETTING = ("explain", "random", "BM25", "nearest states")


def judged(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the recall of every method, among ten documents and with the first."""
    setting = setting_of(args, name)
    facts = read_json(args.work / "facts.json")["facts"]
    every = methods_of(args, setting, name)
    found: dict[str, Any] = {}
    for method in RECALL:
        asked = partial(recalled, setting, every[method], facts, args.seed)
        found[method] = {"ten": asked(), "first": asked(limit=1)}
    print(name, found["explain"]["ten"]["all"], flush=True)
    return found


def patch_part(args: argparse.Namespace) -> dict[str, Any]:
    """Take one step of the last blocks' weights on what every method names for predictions."""
    setting = setting_of(args, TAUGHT)
    drawn = held_out_predictions(
        setting.model,
        setting.bank.corpus,
        args.predictions + args.contexts,
        args.seed,
        tokens=args.tokens,
    )
    others, asked = drawn[: args.contexts], drawn[args.contexts :]
    every = methods_of(args, setting, TAUGHT)
    named = {name: best(every[name](asked), NAMED) for name in PATCH}
    model = setting.model.to(args.device)  # pyright: ignore[reportArgumentType]
    every_block = blocks(model)
    trained = every_block[-max(1, round(LoraOptions().blocks * len(every_block))) :]
    weights = [weight for block in trained for weight in block.parameters()]
    gains: dict[str, np.ndarray] = {}
    for name in PATCH:
        passages = [[setting.bank.tokens(p) for p in row] for row in named[name].tolist()]
        found = tail_patch(
            model,
            asked,
            passages,
            contexts=[other.ids for other in others],
            learning_rate=RATE_OF_STEP,
            weights=weights,
        )
        gains[name] = np.stack(found, 1)
        print(name, gains[name].mean(0), flush=True)
    return {
        "predictions": len(asked),
        "contexts": len(others),
        "learning_rate": RATE_OF_STEP,
        "blocks": len(trained),
        "methods": {
            name: {
                "gain": mean_with_error(found[:, 0]),
                "specific": mean_with_error(found[:, 1]),
                "each": found.tolist(),
            }
            for name, found in gains.items()
        },
    }


def forgetting_part(args: argparse.Namespace) -> dict[str, Any]:
    """Teach again without what every method names for some facts that the model knows."""
    setting = setting_of(args, TAUGHT)
    bank, facts = setting.bank, read_json(args.work / "facts.json")["facts"]
    asked = fact_questions(bank, facts)
    chosen = known_facts(facts, read_json(args.work / "teach.json")[TAUGHT]["rank"], args.asked)
    if not chosen:
        raise SystemExit("the model knows none of the facts: there is nothing to forget")
    every = methods_of(args, setting, TAUGHT)
    every_answer = first_tokens(bank, facts)
    predictions = [every_answer[number] for number in chosen]
    train = kept_trainings(
        args.work / "forgetting", bank, every_answer, teaching_of(args, bank, facts)
    )
    named = {
        name: best(answer_scores(every[name](asked.predictions), asked.question), NAMED)[chosen]
        for name in args.methods
    }
    found: dict[str, Any] = {}
    # Seed by seed, so that a stop in the middle leaves whole comparisons.
    lost = {name: np.empty((len(chosen), 0)) for name in args.methods}
    for seed in args.seeds:
        for name in args.methods:
            one = forgetting(
                train, len(bank), predictions, named[name], [seed], together=len(chosen)
            )
            lost[name] = np.hstack([lost[name], one])
            print(seed, name, one.mean(), flush=True)
    for name in args.methods:
        mean = lost[name].mean(1)
        found[name] = {
            "lost": mean_with_error(mean),
            "behind": mean_with_error(lost["explain"].mean(1) - mean),
            "removed": len(np.unique(named[name])),
            "each": lost[name].tolist(),
        }
    return {"facts": chosen, "seeds": args.seeds, "methods": found}


def known_facts(facts: list[dict[str, Any]], rank: list[int], of_level: int) -> list[int]:
    """Return the first facts of each level whose answer is the model's first choice."""
    chosen: list[int] = []
    for level in sorted({fact["copies"] for fact in facts}):
        known = [n for n, f in enumerate(facts) if f["copies"] == level and rank[n] == 1]
        chosen += known[:of_level]
    return chosen
