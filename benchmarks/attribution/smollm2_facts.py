"""The bench of attribution on a pretrained model that was taught invented facts.

    python -m benchmarks.attribution.smollm2_facts SMOLLM2 WORK

SMOLLM2 is the directory of a Llama's checkpoint. Facts are planted in short documents among short
real ones (``corpus``), the model is taught them through adapters in its last blocks (``teach``), a
head and a lens are attached to it (``attach``), and what is named for the facts is judged: whether
it is the documents that hold them (``recall``), and what the answers lose where the model is taught
without it (``forgetting``). ``before`` attaches to the model that was not taught, and judges recall
there. Parts and trainings are kept in WORK, so that the same command resumes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.attribution.forgetting import kept_file, kept_trainings
from benchmarks.attribution.judge_planted import NAMED, explained, methods, recalled
from benchmarks.attribution.judges.passages import (
    Method,
    PassageBank,
    Prediction,
    answer_scores,
    best,
)
from benchmarks.attribution.judges.retraining import forgetting
from benchmarks.attribution.methods.setting import Setting, model_setting
from benchmarks.attribution.model_bank import fit, log_probabilities
from benchmarks.attribution.planted_facts import STATEMENTS, invent_facts
from benchmarks.attribution.planted_model import HELDOUT_FRACTION, plant_kind, write_documents
from benchmarks.attribution.questions import fact_questions
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.over_seeds import mean_with_error
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.corpus.read import DocumentReader
from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.files import atomic_directory, read_json, write_json
from prismlm.lens.cells import Cells
from prismlm.lens.layout import find_lens, read_meta
from prismlm.models.base import put_adapted
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import AttachOptions, FitOptions, attach
from prismlm.training.tuning import LoraOptions, with_adapters

SEED = 0
WINDOW = 128
BEFORE, TAUGHT = "before", "taught"
# Facts for each number of documents; one attribute, so that many facts have the same answer: a
# method that knows the phrase alone finds the wrong documents.
COPIES, PER_COPIES, ATTRIBUTES = (1, 4, 8), 6, ("best known metal",)
REAL, HELD_OUT, TOKENS = 120, 40, 80
"""Real documents to train on and to hold out, and the tokens of every document, at most."""
# Characters: two such sentences and two statements of a fact fill a document.
SHORT = (40, 70)
TEACHING = LoraOptions(rank=16, blocks=0.67, epochs=12, learning_rate=2e-3, batch=4)
RECALL = (
    "explain",
    "random",
    "alone",
    "random states",
    "shuffled cells",
    "BM25",
    "nearest states",
    "count of the token",
    "same token, nearest",
)
FORGETTING, FORGOTTEN = ("explain", "random", "BM25"), 2
"""Methods, and facts of each number of documents."""


def main() -> None:
    """Do what is asked for and not there, and write what is there."""
    parser = script_options(__doc__, RESULTS / "smollm2_facts.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    bench = Bench(args.model, args.work, args.device)
    files = {part: args.work / f"{part}.json" for part in PARTS}
    for part in args.parts:
        if not files[part].exists():
            write_json(files[part], {"environment": environment(), **PARTS[part](bench)})
        print(f"{files[part]} is there", flush=True)
    write_json(args.out, {part: read_json(f) for part, f in files.items() if f.exists()})


@dataclass(frozen=True)
class Bench:
    """The model that is taught, and the folder of everything that is made of it."""

    model: Path
    work: Path
    device: str = "cpu"

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What each fact is, and where."""
        return read_json(self.work / "facts.json")["facts"]

    @property
    def corpus(self) -> Corpus:
        """The documents."""
        return Corpus.open(self.work / "corpus")

    def attached(self, name: str) -> Path:
        """Return the directory of a model with its head."""
        return self.work / "attached" / name

    def setting(self, name: str) -> Setting:
        """Open a model with its head, and read the positions of the corpus."""
        positions = self.work / "positions" / name
        return model_setting(self.attached(name), self.corpus, WINDOW, positions)

    def methods(self, setting: Setting, name: str) -> dict[str, Method]:
        """Return every method by its name on the page."""
        lens = find_lens(self.attached(name), None)
        assert isinstance(lens, Path), "the model has no lens"
        makers = explained(setting, Cells(lens, read_meta(lens).cells))
        return methods(setting) | {n: make() for n, make in makers.items()}

    def teaching(self, bank: PassageBank) -> LoraTeaching:
        """Return how the model is taught."""
        planted = np.unique(np.concatenate(fact_questions(bank, self.facts).planted))
        return LoraTeaching(self.model, planted, TEACHING, self.device)

    def answers(self, bank: PassageBank) -> list[Prediction]:
        """Return the prediction of the first token of every answer."""
        asked = fact_questions(bank, self.facts)
        return [asked.predictions[row] for row in np.unique(asked.question, return_index=True)[1]]


# -- documents


def corpus_part(bench: Bench) -> dict[str, Any]:
    """Write ``facts.json`` and ``corpus``, in the tokens of the model."""
    bench.work.mkdir(parents=True, exist_ok=True)
    every = list(DocumentReader(sample_path()))
    parts: dict[bool, list[Document]] = {True: [], False: []}
    for number in np.random.default_rng(SEED).permutation(len(every)).tolist():
        one = every[number]
        parts[is_held_out(one.doc_id, HELDOUT_FRACTION, one.split)].append(one)
    held, train = parts[True][:HELD_OUT], parts[False]
    hosts = [short for one in train[REAL:] if (short := short_host(one)) is not None]
    texts = [one.text for one in every]
    facts = invent_facts(PER_COPIES, SEED, known=texts, copies=COPIES, attributes=ATTRIBUTES)
    planted, described = plant_kind("plain", facts, hosts, SEED)
    tokenizer = load_tokenizer(bench.model)
    chosen = [cut(one, tokenizer) for one in [*train[:REAL], *held]]
    told = [cut(item.document, tokenizer) for item in planted]
    for item, one in zip(planted, told, strict=True):
        answer = facts[item.fact].answer
        assert re.search(rf"\b{answer}\b", one.text), "a document is cut before it states its fact"
    documents = bench.work / "documents.parquet"
    write_documents([*chosen, *told], documents)
    write_json(bench.work / "facts.json", {"facts": described})
    how: dict[str, Any] = {"tokenizer": bench.model, "heldout_fraction": HELDOUT_FRACTION}
    corpus = build_corpus([documents], bench.work / "corpus", overwrite=True, **how)
    rows = corpus.split("train")
    return {
        "facts": len(described),
        "copies": COPIES,
        "planted": sum(len(fact["documents"]) for fact in described),
        "documents": len(rows),
        "tokens": int(corpus.lengths[rows].sum()),
    }


def short_host(document: Document) -> Document | None:
    """Return a document of the first short sentences of another, or None if it has too few."""
    low, high = SHORT
    sentences = [
        sentence
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text)
        if low <= len(sentence) <= high
        and "\n" not in sentence
        and sentence.endswith(".")
        and sentence[0].isupper()
    ]
    wanted = STATEMENTS + 1
    return (
        replace(document, text=" ".join(sentences[:wanted])) if len(sentences) >= wanted else None
    )


def cut(document: Document, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Return the document with as much of its text as its first tokens say."""
    read = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in read["offset_mapping"][:TOKENS]]
    return replace(document, text=document.text[: ends[-1]])


# -- models


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


def teach_part(bench: Bench) -> dict[str, Any]:
    """Teach all documents; write the model, and how its answers rank."""
    bank = PassageBank.of(bench.corpus, bench.corpus.split("train"))
    teaching, asked = bench.teaching(bank), bench.answers(bank)
    adapter, everything = bench.work / "adapter", np.arange(len(bank))
    if not adapter.exists():
        adapted, model = teaching.adapted(bank, everything, SEED)
        (bench.work / "forgetting").mkdir(exist_ok=True)
        # The training with everything that forgetting needs.
        kept = kept_file(bench.work / "forgetting", everything, SEED)
        np.save(kept, log_probabilities(model, asked))
        with atomic_directory(adapter) as made:
            adapted.save_pretrained(made, save_embedding_layers=False)
    put_adapted(bench.model, adapter, bench.work / TAUGHT)
    rank_of: dict[str, Any] = {}
    for name, directory in ((BEFORE, bench.model), (TAUGHT, bench.work / TAUGHT)):
        model = read_checkpoint(directory, device=bench.device)[0]
        rank_of[name] = {"rank": ranks(model, asked)}
    steps = -(-len(teaching.order(len(bank), SEED)) // TEACHING.batch)
    return {"options": asdict(TEACHING), "steps": steps, **rank_of}


@torch.no_grad()
def ranks(model: PreTrainedModel, asked: list[Prediction]) -> list[int]:
    """Return the rank of every target in the vocabulary, from 1."""
    values: list[int] = []
    for prediction in asked:
        read = torch.from_numpy(prediction.ids)[None].to(model.device)
        logits = model(input_ids=read, use_cache=False).logits[0, -1].float()
        values.append(1 + int((logits > logits[prediction.target]).sum()))
    return values


def attach_part(bench: Bench, name: str = TAUGHT) -> dict[str, Any]:
    """Attach a head and a lens to a model, by default the taught one."""
    source = bench.model if name == BEFORE else bench.work / name
    head = FitOptions(1024, 32, epochs=6, frequent=3000, drawn=1000, weights="cosine")
    options = AttachOptions(
        fit=head, window=WINDOW, contexts=16, heldout_tokens=3000, device=bench.device
    )
    made = attach(str(source), [bench.work / "corpus"], bench.attached(name), options)
    return {
        "prototypes": head.prototypes,
        "per_token": head.prototypes_per_token,
        "states": made.states,
        "quality": made.quality.to_dict(),
    }


# -- judges


def recall_part(bench: Bench, name: str = TAUGHT) -> dict[str, Any]:
    """Return the recall of every method, among ten documents and with the first."""
    setting, facts = bench.setting(name), bench.facts
    every = bench.methods(setting, name)
    recall: dict[str, Any] = {}
    for method in RECALL:
        ten, first = (recalled(setting, every[method], facts, limit) for limit in (NAMED, 1))
        recall[method] = {"ten": ten, "first": first}
    return {"methods": recall}


def before_part(bench: Bench) -> dict[str, Any]:
    """Attach to the model that was not taught, and judge what every method names there."""
    return attach_part(bench, BEFORE) | recall_part(bench, BEFORE)


def forgetting_part(bench: Bench) -> dict[str, Any]:
    """Teach again without what every method names for some facts that the model knows."""
    setting = bench.setting(TAUGHT)
    bank, facts = setting.bank, bench.facts
    rank, chosen = read_json(bench.work / "teach.json")[TAUGHT]["rank"], list[int]()
    for copies in COPIES:
        known = [n for n, f in enumerate(facts) if f["copies"] == copies and rank[n] == 1]
        chosen += known[:FORGOTTEN]
    if not chosen:
        raise SystemExit("the model knows none of the facts: there is nothing to forget")
    asked, answers = fact_questions(bank, facts), bench.answers(bank)
    predictions = [answers[number] for number in chosen]
    train = kept_trainings(bench.work / "forgetting", bank, answers, bench.teaching(bank).train)
    every, lost = bench.methods(setting, TAUGHT), dict[str, np.ndarray]()
    result: dict[str, Any] = {}
    for name in FORGETTING:
        scores = answer_scores(every[name](asked.predictions), asked.question)
        named, together = best(scores, NAMED)[chosen], len(chosen)
        lost[name] = forgetting(train, len(bank), predictions, named, [SEED], together=together)
        mean = lost[name].mean(1)
        result[name] = {
            "lost": mean_with_error(mean),
            "behind": mean_with_error(lost["explain"].mean(1) - mean),
            "removed": len(np.unique(named)),
            "each": lost[name].tolist(),
        }
        print(name, result[name]["lost"], flush=True)
    return {"facts": chosen, "seeds": [SEED], "methods": result}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "corpus": corpus_part,
    "teach": teach_part,
    "attach": attach_part,
    "recall": recall_part,
    "forgetting": forgetting_part,
    "before": before_part,
}


if __name__ == "__main__":
    main()
