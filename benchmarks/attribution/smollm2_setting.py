"""What the parts of ``smollm2_facts.py`` work on: the documents, the facts, the models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.judge_planted import explained, methods
from benchmarks.attribution.judges.passages import Method, PassageBank, Prediction
from benchmarks.attribution.lora_teaching import LoraTeaching
from benchmarks.attribution.methods.setting import Setting, model_setting
from benchmarks.attribution.questions import fact_questions
from prismlm.corpus import Corpus
from prismlm.files import read_json
from prismlm.lens.cells import Cells
from prismlm.lens.layout import find_lens, read_meta
from prismlm.training.tuning import LoraOptions

WINDOW = 128
BEFORE, TAUGHT = "before", "taught"


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
    options = LoraOptions(
        rank=given.rank,
        blocks=given.blocks,
        epochs=given.epochs,
        learning_rate=given.rate,
        batch=4,
    )
    return LoraTeaching(given.model, given.work / "entering.npy", planted, options, given.device)


def first_tokens(bank: PassageBank, facts: list[dict[str, Any]]) -> list[Prediction]:
    """Return the prediction of the first token of every answer."""
    asked = fact_questions(bank, facts)
    return [asked.predictions[row] for row in np.unique(asked.question, return_index=True)[1]]


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
    makers = explained(setting, Cells(lens, meta.cells), given.seed)
    return methods(setting, given.seed) | {n: make() for n, make in makers.items()}
