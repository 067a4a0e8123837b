"""Search what the equation of evidence by position leaves open, on half of the questions.

    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1
    python -m benchmarks.attribution.search_choices planted
    python -m benchmarks.attribution.search_choices planted --patch   # of the best

Recall of planted facts is looked at for every choice; tail-patch, which takes a minute each, for
the best of them and for the other methods. The choice is made on a seeded half of the facts and
predictions, and what is reported of it is of the other half.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.methods.at_random import AtRandom, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.nearest import NearestStates
from benchmarks.attribution.methods.setting import Setting, kept_positions
from benchmarks.attribution.methods.words import ByWords
from benchmarks.attribution.questions import fact_questions, held_out_predictions
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.eval.passage_recall import document_recall
from prismlm.eval.passages import Method, PassageBank, Prediction, answer_scores, best
from prismlm.eval.tail_patch import tail_patch
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import load_checkpoint

NAMED = 10
PREDICTIONS = 100
GRID: dict[str, tuple[Any, ...]] = {
    "temperature": (0.02, 0.05, 0.1, 0.2, 0.5),
    "doubt": (0.0, 0.5, 1.0),
    "cells": (1, 4, 16, None),
    "spread": ("jointly", "weighed", "by_prototype"),
    "whitening": (0.0, 0.5, 1.0),
    "signed": (False, True),
}


def main() -> None:
    """Search, or measure tail-patch of what was found."""
    parser = script_options(__doc__, RESULTS / "attribution_choices.json")
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("--patch", action="store_true", help="tail-patch of the best choices")
    parser.add_argument("--seed", type=int, default=0, help="of halves and predictions")
    parser.add_argument("--best", type=int, default=6, help="choices that --patch looks at")
    arguments = parser.parse_args()
    setting = planted_setting(arguments.planted)
    facts = read_json(arguments.planted / "facts.json")["facts"]
    if arguments.patch:
        result = read_json(arguments.out)
        result["tail_patch"] = patched(setting, result, arguments.best, arguments.seed)
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
    checkpoint = load_checkpoint(planted / "model")
    corpus = Corpus.open(planted / "corpus")
    window = int(read_json(planted / "model" / "training.json")["recipe"]["data"]["length"])
    bank = PassageBank.of(corpus, corpus.split("train"))
    model, head, logit_map = checkpoint.model, checkpoint.sidecar.head, checkpoint.sidecar.logit_map
    positions = kept_positions(
        planted / "positions", model, head, logit_map, bank, window=window, stride=window * 3 // 4
    )
    return Setting(model, checkpoint.tokenizer, head, logit_map, bank, positions, window)


def choices() -> Iterator[Choices]:
    """Yield what is tried: whole grids of what acts together."""
    for values in itertools.product(*GRID.values()):
        tried = Choices(**dict(zip(GRID, values, strict=True)))
        # Without cells nothing is spread, and the signed form has its own term for doubt.
        if tried.cells is None and tried.spread != "jointly":
            continue
        # It reads whole cells, of every token: dear, so fewer of it.
        plain = tried.doubt == 0 and tried.spread == "jointly" and tried.cells in (4, 16)
        if not tried.signed or plain:
            yield tried


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


def patched(
    setting: Setting, result: dict[str, Any], count: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Return tail-patch of the best choices and of the other methods, on both halves."""
    corpus = setting.bank.corpus
    predictions = held_out_predictions(setting.model, corpus, PREDICTIONS, seed)
    methods: dict[str, Method] = {
        "random": AtRandom(setting.bank, seed),
        "bm25": ByWords(setting.bank),
        "nearest states": NearestStates(setting),
        "same token at random": SameToken(setting, counted=False, seed=seed),
        "same token, nearest": NearestStates(setting, same_token=True),
    }
    for row in result["recall"][:count]:
        choice = Choices(**row["choices"])
        for varied in (choice, replace(choice, doubt=1.0)):
            methods[str(asdict(varied))] = EvidenceByPosition(setting, varied)
    searched = halves(len(predictions), seed)
    gains: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        values = gain(setting, method, predictions)
        gains[name] = {
            "search": mean_with_error(values[searched]),
            "report": mean_with_error(values[~searched]),
            "all": mean_with_error(values),
            "gains": values.tolist(),
        }
        print(name, gains[name]["all"], flush=True)
    return gains


def gain(setting: Setting, method: Method, predictions: Sequence[Prediction]) -> np.ndarray:
    """Return the tail-patch of a method's ten best passages for each prediction, in nats."""
    named = best(method(predictions), NAMED)
    passages = [[setting.bank.tokens(passage) for passage in row] for row in named.tolist()]
    return tail_patch(setting.model, predictions, passages)


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
