"""The bench of attribution on a pretrained model that was taught invented facts.

    python -m benchmarks.attribution.smollm2_facts SMOLLM2 WORK

SMOLLM2 is the directory of a Llama's checkpoint. Facts are planted in short documents among short
real ones (``corpus``), the model is taught them through adapters in its last blocks (``teach``), a
head and a lens are attached to it and to the model before (``attach``), and what is named for the
facts is judged: whether it is the documents that hold them (``recall``), whether a step on it makes
other predictions likelier (``patch``), and what the answers lose where the model is taught without
it (``forgetting``). Each part is kept in WORK, as is each prediction and each training within one,
so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution import smollm2_corpus
from benchmarks.attribution.forgetting import kept_file, kept_trainings
from benchmarks.attribution.judge_planted import explained, methods, recalled
from benchmarks.attribution.lora_teaching import LoraTeaching, first_trained
from benchmarks.attribution.methods.evidence import Choices
from benchmarks.attribution.methods.setting import Setting
from benchmarks.attribution.questions import fact_questions, held_out_predictions
from benchmarks.attribution.search_choices import NAMED, mean_with_error, model_setting
from benchmarks.attribution.small_models import log_probabilities
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.eval.passages import Method, PassageBank, Prediction, answer_scores, best
from prismlm.eval.retraining import forgetting
from prismlm.eval.tail_patch import tail_patch
from prismlm.files import atomic_directory, read_json, write_json
from prismlm.index.cells import Cells
from prismlm.index.layout import find_lens, read_meta
from prismlm.models.base import put_adapted
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import AttachOptions, FitOptions, attach
from prismlm.training.lora import LoraOptions
from prismlm.training.parallel import blocks

WINDOW = 128
RATE_OF_STEP = 0.05
BEFORE, TAUGHT = "before", "taught"
RECALL = (
    "explain",
    "random",
    "whole ranges",
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
FORGETTING = ("explain", "BM25", "nearest states", "random")


def main() -> None:
    """Do what is asked for and not there, and write what is there."""
    parser = script_options(__doc__, RESULTS / "smollm2_facts.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--facts", type=int, default=6, help="for each number of documents")
    parser.add_argument("--real", type=int, default=160, help="real documents to train on")
    parser.add_argument("--heldout", type=int, default=60, help="and to hold out")
    parser.add_argument("--tokens", type=int, default=80, help="of every document")
    parser.add_argument("--epochs", type=int, default=5, help="over the facts' documents")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--predictions", type=int, default=12, help="for tail-patch")
    parser.add_argument("--contexts", type=int, default=6, help="others for the specific gain")
    parser.add_argument("--asked", type=int, default=3, help="facts of a level, for forgetting")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of forgetting")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for part in given.parts:
        file = given.work / f"{part}.json"
        if not file.exists():
            found = PARTS[part](given)
            write_json(file, {"environment": environment(), **found})
        print(f"{file} is there", flush=True)
    files = {part: given.work / f"{part}.json" for part in PARTS}
    write_json(given.out, {part: read_json(f) for part, f in files.items() if f.exists()})


def corpus_part(given: argparse.Namespace) -> dict[str, Any]:
    """Write the documents."""
    corpus = smollm2_corpus.build(
        given.model,
        given.work,
        per_level=given.facts,
        real=given.real,
        heldout=given.heldout,
        tokens=given.tokens,
        seed=given.seed,
    )
    facts = read_json(given.work / "facts.json")
    train = corpus.split("train")
    return {
        "facts": len(facts["facts"]),
        "copies": smollm2_corpus.COPIES,
        "planted": sum(len(fact["documents"]) for fact in facts["facts"]),
        "statements": facts["statements"],
        "documents": len(train),
        "tokens": int(corpus.lengths[train].sum()),
        "heldout_documents": len(corpus.split("heldout")),
        "cut": given.tokens,
        "seed": given.seed,
    }


def teach_part(given: argparse.Namespace) -> dict[str, Any]:
    """Teach all documents; write the model, and how its answers rank."""
    bank, facts = opened(given)
    teaching = teaching_of(given, bank, facts)
    adapter, everything = given.work / "adapter", np.arange(len(bank))
    asked = first_tokens(bank, facts)
    if not adapter.exists():
        adapted, model = teaching.adapted(bank, everything, given.seed)
        (given.work / "forgetting").mkdir(exist_ok=True)
        # The training with everything that forgetting needs.
        kept = kept_file(given.work / "forgetting", everything, given.seed)
        np.save(kept, log_probabilities(model, asked))
        with atomic_directory(adapter) as made:
            adapted.save_pretrained(made, save_embedding_layers=False)
    put_adapted(given.model, adapter, given.work / TAUGHT)
    found = {
        name: answered(read_checkpoint(directory, device=given.device)[0], asked)
        for name, directory in ((BEFORE, given.model), (TAUGHT, given.work / TAUGHT))
    }
    return {
        "options": asdict(teaching.options),
        "steps": -(-len(teaching.order(len(bank), given.seed)) // teaching.options.batch),
        "copies": [fact["copies"] for fact in facts],
        **found,
    }


def attach_part(given: argparse.Namespace) -> dict[str, Any]:
    """Attach a head and a lens to the taught model and to the one before."""
    fit = FitOptions(prototypes=1024, prototypes_per_token=32, epochs=6, frequent=3000, drawn=1000)
    options = AttachOptions(
        fit=fit, window=WINDOW, contexts=16, heldout_tokens=4000, device=given.device
    )
    found: dict[str, Any] = {"prototypes": fit.prototypes, "per_token": fit.prototypes_per_token}
    for name, source in ((TAUGHT, given.work / TAUGHT), (BEFORE, given.model)):
        made = attach(str(source), [given.work / "corpus"], attached(given, name), options)
        found[name] = {"states": made.states, "quality": made.quality.to_dict()}
    return found


def recall_part(given: argparse.Namespace) -> dict[str, Any]:
    """Judge what every method names for the facts, of both models."""
    found: dict[str, Any] = {}
    for name in (TAUGHT, BEFORE):
        setting = setting_of(given, name)
        facts = read_json(given.work / "facts.json")["facts"]
        every = methods_of(given, setting, name)
        found[name] = {}
        for method in RECALL:
            asked = partial(recalled, setting, every[method], facts, given.seed)
            found[name][method] = {"ten": asked(), "first": asked(limit=1)}
        print(name, found[name]["explain"]["ten"]["all"], flush=True)
    return found


def patch_part(given: argparse.Namespace) -> dict[str, Any]:
    """Take one step of the last blocks' weights on what every method names for predictions."""
    setting = setting_of(given, TAUGHT)
    drawn = held_out_predictions(
        setting.model,
        setting.bank.corpus,
        given.predictions + given.contexts,
        given.seed,
        tokens=given.tokens,
    )
    asked, others = drawn[: -given.contexts], drawn[-given.contexts :]
    every = methods_of(given, setting, TAUGHT)
    named = {name: best(every[name](asked), NAMED) for name in PATCH}
    model = setting.model.to(given.device)  # pyright: ignore[reportArgumentType]
    options = LoraOptions()
    trained = blocks(model)[first_trained(model, options) :]
    weights = [weight for block in trained for weight in block.parameters()]
    (given.work / "patch").mkdir(exist_ok=True)
    rows: list[dict[str, list[float]]] = []
    for number, prediction in enumerate(asked):
        file = given.work / "patch" / f"{number}.json"
        if not file.exists():
            passages = [[setting.bank.tokens(p) for p in named[name][number]] for name in PATCH]
            gains = tail_patch(
                model,
                [prediction] * len(PATCH),
                passages,
                contexts=[other.ids for other in others],
                learning_rate=RATE_OF_STEP,
                weights=weights,
            )
            pairs = zip(gains.gain.tolist(), gains.specific.tolist(), strict=True)
            write_json(file, dict(zip(PATCH, map(list, pairs), strict=True)))
        rows.append(read_json(file))
        print(f"{number + 1} of {len(asked)}: {rows[-1]}", flush=True)
    gains = {name: np.array([row[name] for row in rows]) for name in PATCH}
    return {
        "predictions": len(asked),
        "contexts": len(others),
        "learning_rate": RATE_OF_STEP,
        "blocks": len(trained),
        "methods": {name: compared(found, gains[PATCH[0]]) for name, found in gains.items()},
    }


def compared(gains: np.ndarray, explained: np.ndarray) -> dict[str, Any]:
    """Return means of gains and specifics, and what ``explain`` has more, with their errors."""
    described: dict[str, Any] = {}
    for column, name in enumerate(("gain", "specific")):
        described[name] = mean_with_error(gains[:, column])
        described[f"{name} behind"] = mean_with_error(explained[:, column] - gains[:, column])
    return described | {"each": gains.tolist()}


def forgetting_part(given: argparse.Namespace) -> dict[str, Any]:
    """Teach again without what every method names for some facts that the model knows."""
    setting = setting_of(given, TAUGHT)
    bank, facts = setting.bank, read_json(given.work / "facts.json")["facts"]
    asked = fact_questions(bank, facts)
    chosen = known_facts(facts, read_json(given.work / "teach.json")[TAUGHT]["rank"], given.asked)
    if not chosen:
        raise SystemExit("the model knows none of the facts: there is nothing to forget")
    every = methods_of(given, setting, TAUGHT)
    every_answer = first_tokens(bank, facts)
    predictions = [every_answer[number] for number in chosen]
    train = kept_trainings(
        given.work / "forgetting", bank, every_answer, teaching_of(given, bank, facts)
    )
    named = {
        name: best(answer_scores(every[name](asked.predictions), asked.question), NAMED)[chosen]
        for name in FORGETTING
    }
    found: dict[str, Any] = {}
    # Seed by seed, so that a stop in the middle leaves whole comparisons.
    lost = {name: np.empty((len(chosen), 0)) for name in FORGETTING}
    for seed in given.seeds:
        for name in FORGETTING:
            one = forgetting(
                train, len(bank), predictions, named[name], [seed], together=len(chosen)
            )
            lost[name] = np.hstack([lost[name], one])
            print(seed, name, one.mean(), flush=True)
    for name in FORGETTING:
        mean = lost[name].mean(1)
        planted = [set(asked.planted[number].tolist()) for number in chosen]
        found[name] = {
            "lost": mean_with_error(mean),
            "behind": mean_with_error(lost["explain"].mean(1) - mean),
            "removed": len(np.unique(named[name])),
            "own planted removed": float(
                np.mean([len(p & set(named[name].ravel().tolist())) / len(p) for p in planted])
            ),
            "each": lost[name].tolist(),
        }
    return {
        "facts": chosen,
        "copies": [facts[number]["copies"] for number in chosen],
        "seeds": given.seeds,
        "kept": np.array([train(np.arange(len(bank)), s)(predictions) for s in given.seeds])
        .mean(1)
        .tolist(),
        "methods": found,
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "corpus": corpus_part,
    "teach": teach_part,
    "attach": attach_part,
    "recall": recall_part,
    "forgetting": forgetting_part,
    "patch": patch_part,
}


def opened(given: argparse.Namespace) -> tuple[PassageBank, list[dict[str, Any]]]:
    """Return the documents to train on, each a passage, and the facts."""
    corpus = Corpus.open(given.work / "corpus")
    return PassageBank.of(corpus, corpus.split("train")), read_json(given.work / "facts.json")[
        "facts"
    ]


def teaching_of(
    given: argparse.Namespace, bank: PassageBank, facts: list[dict[str, Any]]
) -> LoraTeaching:
    """Return how the model is taught."""
    planted = np.unique(np.concatenate(fact_questions(bank, facts).planted))
    options = LoraOptions(epochs=given.epochs, learning_rate=given.rate, batch=4)
    return LoraTeaching(given.model, given.work / "entering.npy", planted, options, given.device)


def first_tokens(bank: PassageBank, facts: list[dict[str, Any]]) -> list[Prediction]:
    """Return the prediction of the first token of every answer."""
    asked = fact_questions(bank, facts)
    return [asked.predictions[row] for row in np.unique(asked.question, return_index=True)[1]]


@torch.no_grad()
def answered(model: PreTrainedModel, asked: list[Prediction]) -> dict[str, list[float]]:
    """Return the rank of every target in the vocabulary, from 1, and its log-probability."""
    ranks, likely = [], []
    for prediction in asked:
        read = torch.from_numpy(prediction.ids)[None].to(model.device)
        logits = model(input_ids=read, use_cache=False).logits[0, -1].float()
        ranks.append(1 + int((logits > logits[prediction.target]).sum()))
        likely.append(float(logits.log_softmax(-1)[prediction.target]))
    return {"rank": ranks, "log_probability": likely}


def known_facts(facts: list[dict[str, Any]], rank: list[int], of_level: int) -> list[int]:
    """Return the first facts of each level whose answer is the model's first choice."""
    chosen: list[int] = []
    for level in sorted({fact["copies"] for fact in facts}):
        known = [n for n, f in enumerate(facts) if f["copies"] == level and rank[n] == 1]
        chosen += known[:of_level]
    return chosen


def attached(given: argparse.Namespace, name: str) -> Path:
    """Return the directory of a model with its head."""
    return given.work / "attached" / name


def setting_of(given: argparse.Namespace, name: str) -> Setting:
    """Open a model with its head, and read the positions of the corpus."""
    corpus = Corpus.open(given.work / "corpus")
    return model_setting(attached(given, name), corpus, WINDOW, given.work / "positions" / name)


def methods_of(given: argparse.Namespace, setting: Setting, name: str) -> dict[str, Method]:
    """Return every method by its name on the page."""
    lens = find_lens(attached(given, name), None)
    assert lens is not None, "the model has no lens"
    meta = read_meta(lens)
    assert meta.cells is not None, "the lens has no cells"
    every = methods(setting, Choices(), given.seed)
    return every | explained(setting, Cells(lens, meta.cells), given.seed)


if __name__ == "__main__":
    main()
