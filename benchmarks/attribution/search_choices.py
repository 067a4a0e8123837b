"""Search what the equation of evidence by position leaves open, on half of the questions.

    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1
    python -m benchmarks.attribution.search_choices planted
    python -m benchmarks.attribution.search_choices planted --patch

Recall of planted facts is looked at for every choice; tail-patch, which takes a minute each, for
one choice after another, each from the best before it. Choices are made on a seeded half of the
facts and of the predictions, and what is reported is of the other half.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.judges.passage_recall import document_recall
from benchmarks.attribution.judges.passages import (
    Method,
    PassageBank,
    Prediction,
    answer_scores,
    best,
)
from benchmarks.attribution.judges.tail_patch import PatchGains, tail_patch
from benchmarks.attribution.methods.at_random import AtRandom, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.nearest import NearestStates
from benchmarks.attribution.methods.setting import Setting, kept_positions
from benchmarks.attribution.methods.words import ByWords
from benchmarks.attribution.questions import fact_questions, held_out_predictions
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import load_checkpoint

NAMED = 10
PREDICTIONS = 100
# In which a target's log-odds are looked at beside its own.
CONTEXTS = 16
# Tail-patch is looked at for all of the first, then for changes of the best, one at a time.
STARTS = [Choices(temperature) for temperature in (0.05, 0.1, 0.2, 0.5)]
CHANGES: tuple[dict[str, Any], ...] = ({"doubt": 1.0}, {"whitening": 1.0}, {"signed": True})
GRID: dict[str, tuple[Any, ...]] = {
    "temperature": (0.02, 0.05, 0.1, 0.2, 0.5),
    "doubt": (0.0, 1.0),
    "cells": (1, 4, 16, None),
    "spread": ("jointly", "weighed", "by_prototype"),
    "whitening": (0.0, 1.0),
}


def main() -> None:
    """Search, or measure tail-patch of what was found."""
    parser = script_options(__doc__, RESULTS / "attribution_choices.json")
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("--patch", action="store_true", help="search by tail-patch")
    parser.add_argument("--seed", type=int, default=0, help="of halves and predictions")
    arguments = parser.parse_args()
    setting = planted_setting(arguments.planted)
    facts = read_json(arguments.planted / "facts.json")["facts"]
    if arguments.patch:
        result = read_json(arguments.out)
        result["tail_patch"] = patched(setting, arguments.seed)
    else:
        result = {
            "environment": environment(),
            "seed": arguments.seed,
            "recall": recalled(setting, facts, arguments.seed),
        }
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def planted_setting(planted: Path) -> Setting:
    """Open the planted model, and read the positions of its training text unless they are there."""
    window = int(read_json(planted / "model" / "training.json")["recipe"]["data"]["length"])
    corpus = Corpus.open(planted / "corpus")
    return model_setting(planted / "model", corpus, window, planted / "positions")


def model_setting(directory: Path, corpus: Corpus, window: int, kept: Path) -> Setting:
    """Open a model with its head, and read the positions of a corpus unless they are ``kept``."""
    checkpoint = load_checkpoint(directory)
    bank = PassageBank.of(corpus, corpus.split("train"))
    model, head, logit_map = checkpoint.model, checkpoint.sidecar.head, checkpoint.sidecar.logit_map
    positions = kept_positions(
        kept, model, head, logit_map, bank, window=window, stride=window * 3 // 4
    )
    return Setting(model, checkpoint.tokenizer, head, logit_map, bank, positions, window)


def choices() -> Iterator[Choices]:
    """Yield what is tried: whole grids of what acts together."""
    for values in itertools.product(*GRID.values()):
        tried = Choices(**dict(zip(GRID, values, strict=True)))
        # Without cells nothing is spread.
        if tried.cells is not None or tried.spread == "jointly":
            yield tried
    # The signed form reads whole cells, of every token: dear, so fewer of it.
    for whitening in (0.0, 1.0):
        yield Choices(0.1, whitening=whitening, signed=True)
    for cells in (1, 4, 8):
        yield Choices(0.1, cells=cells, order="nearest")


def recalled(setting: Setting, facts: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the recall of every choice on both halves of the facts, the best first.

    Sorted by the half that choices are made on, ``search``; ``report`` is of the other.
    """
    asked = fact_questions(setting.bank, facts)
    read = setting.ask(asked.predictions)
    searched = halves(len(facts), seed)
    rows: list[dict[str, Any]] = []
    tried = list(choices())
    for number, choice in enumerate(tried):
        method = EvidenceByPosition(setting, choice)
        scores = np.stack([method.scores(read, row) for row in range(len(read.targets))])
        documents = setting.bank.by_document(answer_scores(scores, asked.question))
        found = document_recall(documents, asked.planted, NAMED)
        row = {
            "choices": asdict(choice),
            "search": float(found[searched].mean()),
            "report": float(found[~searched].mean()),
            "all": float(found.mean()),
        }
        rows.append(row)
        print(f"{number + 1} of {len(tried)}: {row}", flush=True)
    return sorted(rows, key=lambda row: -row["search"])


def patched(setting: Setting, seed: int) -> dict[str, Any]:
    """Return tail-patch of choices on one half of predictions, of the best on the other.

    The best is by the specific gain: the plain one only grows with T, towards a count of the
    token. On the other half the other methods stand beside it.
    """
    predictions, contexts = patch_predictions(setting, seed)
    first = halves(len(predictions), seed)
    searched, reported = (
        [p for p, taken in zip(predictions, half, strict=True) if taken] for half in (first, ~first)
    )
    tried: dict[Choices, dict[str, Any]] = {}

    def look_at(choice: Choices) -> None:
        tried[choice] = described(
            gain(setting, EvidenceByPosition(setting, choice), searched, contexts)
        )
        print(asdict(choice), tried[choice], flush=True)

    def best_so_far() -> Choices:
        return max(tried, key=lambda choice: tried[choice]["specific"]["mean"])

    for choice in STARTS:
        look_at(choice)
    for change in CHANGES:
        look_at(replace(best_so_far(), **change))
    best_choice, bank = best_so_far(), setting.bank
    methods: dict[str, Method] = {
        "evidence by position": EvidenceByPosition(setting, best_choice),
        "random": AtRandom(bank, seed),
        "BM25": ByWords(bank),
        "nearest states": NearestStates(setting),
        "same token at random": SameToken(setting, counted=False, seed=seed),
        "count of the token": SameToken(setting, counted=True),
        "same token, nearest": NearestStates(setting, same_token=True),
    }
    result: dict[str, Any] = {
        "search": [{"choices": asdict(choice), **found} for choice, found in tried.items()],
        "best": asdict(best_choice),
        "report": {},
    }
    for name, method in methods.items():
        gains = gain(setting, method, reported, contexts)
        each = {"gains": gains.gain.tolist(), "specifics": gains.specific.tolist()}
        result["report"][name] = described(gains) | each
        print(name, described(gains), flush=True)
    return result


def patch_predictions(setting: Setting, seed: int) -> tuple[list[Prediction], list[np.ndarray]]:
    """Return held-out predictions, and contexts of others for the specific gain."""
    corpus, count = setting.bank.corpus, PREDICTIONS + CONTEXTS
    drawn = held_out_predictions(setting.model, corpus, count, seed)
    return drawn[:-CONTEXTS], [prediction.ids for prediction in drawn[-CONTEXTS:]]


def gain(
    setting: Setting,
    method: Method,
    predictions: Sequence[Prediction],
    contexts: Sequence[np.ndarray],
) -> PatchGains:
    """Return the tail-patch of a method's ten best passages for each prediction."""
    named = best(method(predictions), NAMED)
    passages = [[setting.bank.tokens(passage) for passage in row] for row in named.tolist()]
    return tail_patch(setting.model, predictions, passages, contexts=contexts)


def described(gains: PatchGains) -> dict[str, Any]:
    """Return the means of both gains, with their errors."""
    return {"gain": mean_with_error(gains.gain), "specific": mean_with_error(gains.specific)}


def halves(count: int, seed: int) -> np.ndarray:
    """Return whether each question is of the half that choices are made on, bool [count]."""
    order = np.random.default_rng(seed).permutation(count)
    return order < count // 2


def mean_with_error(values: np.ndarray) -> dict[str, float]:
    """Return the mean and its standard error."""
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    return {"mean": float(values.mean()), "error": error}


if __name__ == "__main__":
    main()
