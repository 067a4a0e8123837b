"""What the parts of ``smollm2_facts.py`` work on: the documents, the facts, the models."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.attribution.judge_planted import explained, methods
from benchmarks.attribution.judges.passages import Method, PassageBank, Prediction
from benchmarks.attribution.methods.setting import Setting, model_setting
from benchmarks.attribution.planted_facts import STATEMENTS, invent_facts
from benchmarks.attribution.planted_model import HELDOUT_FRACTION, plant_kind, write_documents
from benchmarks.attribution.questions import fact_questions
from benchmarks.attribution.small_models import fit
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.corpus.read import read_documents
from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.files import read_json, write_json
from prismlm.lens.cells import Cells
from prismlm.lens.layout import find_lens, read_meta
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training.tuning import LoraOptions, with_adapters

WINDOW = 128
BEFORE, TAUGHT = "before", "taught"
COPIES = (1, 4, 8)
# One, so that many facts have the same answer: who knows the phrase alone finds the wrong ones.
ATTRIBUTES = ("best known metal",)
# Characters: two such sentences and two statements of a fact fill a document.
SHORT = (40, 70)


def build_facts_corpus(
    base: Path, out: Path, *, per_level: int, real: int, heldout: int, tokens: int, seed: int
) -> Corpus:
    """Write ``facts.json`` and ``corpus`` into ``out``, in the tokens of the checkpoint ``base``.

    There are ``per_level`` facts in 1, in 4 and in 8 documents, ``real`` documents of the bundled
    sample to train on and ``heldout`` to hold out; of every document the first ``tokens`` tokens.
    """
    out.mkdir(parents=True, exist_ok=True)
    every = list(read_documents(sample_path()))
    order = np.random.default_rng(seed).permutation(len(every)).tolist()
    shuffled = [every[number] for number in order]
    parts: dict[bool, list[Document]] = {True: [], False: []}
    for one in shuffled:
        parts[is_held_out(one.doc_id, HELDOUT_FRACTION, one.split)].append(one)
    held, train = parts[True][:heldout], parts[False]
    hosts = [short for one in train[real:] if (short := short_host(one)) is not None]
    texts = [one.text for one in every]
    facts = invent_facts(per_level, seed, known=texts, copies=COPIES, attributes=ATTRIBUTES)
    planted, described = plant_kind("plain", facts, hosts, seed)
    tokenizer = load_tokenizer(base)
    chosen = [cut(one, tokenizer, tokens) for one in [*train[:real], *held]]
    told = [cut(item.document, tokenizer, tokens) for item in planted]
    for item, one in zip(planted, told, strict=True):
        answer = facts[item.fact].answer
        assert re.search(rf"\b{answer}\b", one.text), "a document is cut before it states its fact"
    write_documents([*chosen, *told], out / "documents.parquet")
    write_json(out / "facts.json", {"facts": described})
    return build_corpus(
        [out / "documents.parquet"],
        out / "corpus",
        tokenizer=base,
        heldout_fraction=HELDOUT_FRACTION,
        overwrite=True,
    )


def short_host(document: Document) -> Document | None:
    """Return a document of the first short sentences of another, or None if it has too few."""
    low, high = SHORT
    found = [
        sentence
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text)
        if low <= len(sentence) <= high
        and "\n" not in sentence
        and sentence.endswith(".")
        and sentence[0].isupper()
    ]
    wanted = STATEMENTS + 1
    if len(found) < wanted:
        return None
    return replace(document, text=" ".join(found[:wanted]))


def cut(document: Document, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Document:
    """Return the document with as much of its text as its first tokens say."""
    read = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in read["offset_mapping"][:tokens]]
    return replace(document, text=document.text[: ends[-1]])


def opened(args: argparse.Namespace) -> tuple[PassageBank, list[dict[str, Any]]]:
    """Return the documents to train on, each a passage, and the facts."""
    corpus = Corpus.open(args.work / "corpus")
    return PassageBank.of(corpus, corpus.split("train")), read_json(args.work / "facts.json")[
        "facts"
    ]


@dataclass(frozen=True)
class LoraTeaching:
    """How a pretrained model is taught the documents of a bank through low-rank adapters.

    ``planted`` rows of the bank are read in every epoch; the others are read once in all.
    """

    base: Path
    planted: np.ndarray
    options: LoraOptions
    device: str = "cpu"

    def train(self, bank: PassageBank, documents: np.ndarray, seed: int) -> PreTrainedModel:
        """Return the model with adapters in it, taught the documents of these rows."""
        return self.adapted(bank, documents, seed)[1]

    def adapted(
        self, bank: PassageBank, documents: np.ndarray, seed: int
    ) -> tuple[Any, PreTrainedModel]:
        """Return the taught model, as PEFT has it and as itself.

        The seed decides the adapters' first weights and the order of *all* documents, from which
        those that are left out are missing: two models differ in documents alone.
        """
        model, _ = read_checkpoint(self.base, device=self.device)
        adapted = with_adapters(model, replace(self.options, seed=seed))
        order = self.order(len(bank), seed)
        order = order[np.isin(order, documents)]
        fit(model, bank, order, self.options.batch, self.options.learning_rate)
        return adapted, model.eval()

    def order(self, documents: int, seed: int) -> np.ndarray:
        """Return the rows in reading order if none is left out, int64.

        Every epoch has the planted rows and its share of the others.
        """
        generator, epochs = np.random.default_rng(seed), round(self.options.epochs)
        others = generator.permutation(np.setdiff1d(np.arange(documents), self.planted))
        each = [np.concatenate([self.planted, o]) for o in np.array_split(others, epochs)]
        return np.concatenate([generator.permutation(rows) for rows in each])


def teaching_of(
    args: argparse.Namespace, bank: PassageBank, facts: list[dict[str, Any]]
) -> LoraTeaching:
    """Return how the model is taught."""
    planted = np.unique(np.concatenate(fact_questions(bank, facts).planted))
    options = LoraOptions(
        rank=args.rank,
        blocks=args.blocks,
        epochs=args.epochs,
        learning_rate=args.rate,
        batch=4,
    )
    return LoraTeaching(args.model, planted, options, args.device)


def first_tokens(bank: PassageBank, facts: list[dict[str, Any]]) -> list[Prediction]:
    """Return the prediction of the first token of every answer."""
    asked = fact_questions(bank, facts)
    return [asked.predictions[row] for row in np.unique(asked.question, return_index=True)[1]]


def attached(args: argparse.Namespace, name: str) -> Path:
    """Return the directory of a model with its head."""
    return args.work / "attached" / name


def setting_of(args: argparse.Namespace, name: str) -> Setting:
    """Open a model with its head, and read the positions of the corpus."""
    corpus = Corpus.open(args.work / "corpus")
    return model_setting(attached(args, name), corpus, WINDOW, args.work / "positions" / name)


def methods_of(args: argparse.Namespace, setting: Setting, name: str) -> dict[str, Method]:
    """Return every method by its name on the page."""
    lens = find_lens(attached(args, name), None)
    assert lens is not None, "the model has no lens"
    meta = read_meta(lens)
    assert meta.cells is not None, "the lens has no cells"
    makers = explained(setting, Cells(lens, meta.cells), args.seed)
    return methods(setting, args.seed) | {n: make() for n, make in makers.items()}
