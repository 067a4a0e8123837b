"""Every method before the judges that need no retraining, on the model with planted facts.

    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1
    python -m benchmarks.attribution.judge_planted planted

Planted facts by recall of their documents, held-out predictions by tail-patch, held-out documents
by the share that falls on their own domain, on all questions and on either half of them.
Each method has a file of its own, which keeps what judges said of it that are not asked again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.judges.passage_domains import passage_domain_share
from benchmarks.attribution.judges.passages import (
    Method,
    answer_scores,
    best,
    document_recall,
    halves,
)
from benchmarks.attribution.judges.tail_patch import PatchGains, tail_patch
from benchmarks.attribution.methods.baselines import AtRandom, ByWords, NearestStates, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.explain import (
    Explained,
    temporary_cells,
    with_random_states,
)
from benchmarks.attribution.methods.setting import Setting, planted_setting
from benchmarks.attribution.questions import (
    document_predictions,
    fact_questions,
    held_out_predictions,
    twin_recall,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.over_seeds import mean_with_error
from prismlm.files import read_json, write_json
from prismlm.lens.cells import Cells
from prismlm.lens.layout import find_lens, read_meta

JUDGES = ("recall", "domains", "patch")
NAMED, SEED = 10, 0
# Held out: predictions to patch for, and documents whose domains are asked for.
PREDICTIONS, DOCUMENTS = 100, 220
# In which a target's log-odds are looked at beside its own.
CONTEXTS = 16
# What a search found best by tail-patch.
BEST = Choices(0.5, signed=True)


def main() -> None:
    """Judge, and write what was found after every method."""
    parser = script_options(__doc__, RESULTS / "attribution")
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=JUDGES)
    args = parser.parse_args()
    setting = planted_setting(args.planted)
    facts = read_json(args.planted / "facts.json")["facts"]
    args.out.mkdir(exist_ok=True)
    lens = find_lens(args.planted / "model", None)
    assert isinstance(lens, Path), "the model has no lens"
    every = {n: (lambda m=m: m) for n, m in methods(setting).items()}
    every |= explained(setting, Cells(lens, read_meta(lens).cells))
    for name, make in every.items():
        method = make()
        path = args.out / f"{re.sub('[^a-z0-9.]+', '_', name.lower())}.json"
        result = read_json(path) if path.is_file() else {}
        result |= {"name": name, "environment": environment()}
        if "recall" in args.judges:
            result["recall"] = recalled(setting, method, facts)
        if "patch" in args.judges:
            result["patch"] = patched(setting, method)
        if "domains" in args.judges:
            result["domains"] = domains(setting, method)
        write_json(path, result)
        print(f"wrote {path}", flush=True)


def methods(setting: Setting) -> dict[str, Method]:
    """Return every method by its name on the page."""
    bank = setting.bank
    return {
        "random": AtRandom(bank, SEED),
        "BM25": ByWords(bank),
        "BM25, last 16 tokens": ByWords(bank, last=16),
        "nearest states": NearestStates(setting),
        "same token at random": SameToken(setting, counted=False, seed=SEED),
        "count of the token": SameToken(setting, counted=True),
        "same token, nearest": NearestStates(setting, same_token=True),
        "evidence by position": EvidenceByPosition(setting, BEST),
    }


def explained(setting: Setting, cells: Cells) -> dict[str, Callable[[], Method]]:
    """Return what makes ``explain``, and its controls.

    What has cells of its own, of random states or in another code, has them written first.
    """

    def of_random_states() -> Method:
        random = with_random_states(setting, SEED)
        return Explained(random, temporary_cells(random))

    return {
        "explain": lambda: Explained(setting, cells),
        "alone": lambda: Explained(setting, cells, alone=True),
        "shuffled cells": lambda: Explained(setting, cells, shuffled=SEED),
        "random states": of_random_states,
        "explain, pq": lambda: Explained(setting, temporary_cells(setting, "pq")),
    }


def recalled(
    setting: Setting, method: Method, facts: Sequence[dict[str, Any]], limit: int = NAMED
) -> dict[str, dict[str, float]]:
    """Return the recall of the documents of facts, by how they are told."""
    asked = fact_questions(setting.bank, facts)
    scores = answer_scores(method(asked.predictions), asked.question)
    alike = isinstance(method, (NearestStates, ByWords))
    of_document = setting.bank.by_document(scores, best=alike)
    recall = document_recall(of_document, asked.planted, limit)
    twins = twin_recall(facts, limit)
    searched = halves(len(facts), SEED)
    groups = {"all": np.ones(len(facts), dtype=bool), "report": ~searched}
    told = np.array([fact.get("told", "plain") for fact in facts])
    groups |= {f"told {kind}": told == kind for kind in np.unique(told).tolist()}
    return {
        name: mean_with_error(recall[rows]) | {"same answer at random": float(twins[rows].mean())}
        for name, rows in groups.items()
    }


def domains(setting: Setting, method: Method) -> dict[str, Any]:
    """Return where the scores of the first tokens of held-out documents point."""
    corpus, bank = setting.bank.corpus, setting.bank
    names = [name or "" for name in corpus.column("domain")]
    order = np.random.default_rng(SEED).permutation(corpus.split("heldout"))
    chosen, count = order[:DOCUMENTS].tolist(), min(DOCUMENTS, len(order))
    rows: list[np.ndarray] = []
    for number in chosen:
        scores = method(document_predictions(corpus, number)).clip(0)
        rows.append(answer_scores(scores, np.zeros(len(scores), dtype=int))[0])
    of_passage = [names[number] for number in bank.documents[bank.document].tolist()]
    own, searched = np.array([names[number] for number in chosen]), halves(count, SEED)
    groups = {"all": np.ones(count, dtype=bool), "report": ~searched}
    return {
        group: {
            "alike": passage_domain_share(
                np.stack(rows)[kept], of_passage, own[kept].tolist()
            ).to_dict()
        }
        for group, kept in groups.items()
    }


def patched(setting: Setting, method: Method) -> dict[str, Any]:
    """Return the tail-patch of a method's ten best passages for held-out predictions."""
    corpus, count = setting.bank.corpus, PREDICTIONS + CONTEXTS
    drawn = held_out_predictions(setting.model, corpus, count, SEED)
    # Those of others are for the specific gain.
    predictions, others = drawn[:-CONTEXTS], [one.ids for one in drawn[-CONTEXTS:]]
    named = best(method(predictions), NAMED)
    passages = [[setting.bank.tokens(passage) for passage in row] for row in named.tolist()]
    gains = tail_patch(setting.model, predictions, passages, contexts=others)
    searched = halves(len(predictions), SEED)
    return {
        "all": described(gains),
        "report": described(PatchGains(gains.gain[~searched], gains.specific[~searched])),
        "gains": gains.gain.tolist(),
    }


def described(gains: PatchGains) -> dict[str, Any]:
    """Return the means of both gains, with their errors."""
    return {"gain": mean_with_error(gains.gain), "specific": mean_with_error(gains.specific)}


if __name__ == "__main__":
    main()
