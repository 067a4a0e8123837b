"""Train a hundred small models on random halves of the same documents, for LDS.

    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1
    python -m benchmarks.attribution.model_bank planted bank
    python -m benchmarks.attribution.datamodels bank

The documents are the beginnings of real training documents of the planted corpus. A model that is
there already is kept. The folder is laid out as the tool Bergson reads a bank of models:
``subsets.json`` lists the rows that each model of ``retrained/`` was trained *without*.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PASSAGE_TOKENS, PassageBank, Prediction
from benchmarks.attribution.judges.retraining import random_subsets
from benchmarks.attribution.judges.tail_patch import IGNORED, log_probability, passage_loss
from benchmarks.attribution.questions import held_out_predictions
from benchmarks.shared.options import script_options
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json
from prismlm.models.presets import build_config, build_model

DOCUMENTS, PREDICTIONS, MODELS, SEED = 1200, 120, 100, 0


def main() -> None:
    """Train what is missing."""
    parser = script_options(__doc__)
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("bank", type=Path)
    args = parser.parse_args()
    folder, training = args.bank, SmallTraining()
    if not (folder / "settings.json").exists():
        begin(folder, args.planted)
    bank = open_bank(folder)
    everything = np.arange(len(bank))
    if not (folder / "predictions.json").exists():
        model = training.train(bank, everything, SEED)
        save(model, folder, "base", bank)
        asked = held_out_predictions(model, bank.corpus, PREDICTIONS, SEED, tokens=PASSAGE_TOKENS)
        write_predictions(folder, asked)
    predictions = read_predictions(folder)
    for number, left_out in enumerate(read_json(folder / "subsets.json")):
        output = folder / "outputs" / f"{number}.npy"
        if not output.exists():
            kept = np.setdiff1d(everything, left_out)
            model = training.train(bank, kept, SEED)
            save(model, folder, f"subset_{number}", bank)
            output.parent.mkdir(exist_ok=True)
            np.save(output, log_probabilities(model, predictions))
            print(f"model {number} of {MODELS}", flush=True)


def chosen_documents(planted: Path) -> np.ndarray:
    """Return the numbers of random real documents of the training split, ascending."""
    corpus = Corpus.open(planted / "corpus")
    facts = read_json(planted / "facts.json")["facts"]
    invented = {place["doc_id"] for fact in facts for place in fact["documents"]}
    ids = corpus.doc_ids
    real = np.array([n for n in corpus.split("train").tolist() if ids[n] not in invented])
    return np.sort(np.random.default_rng(SEED).permutation(real)[:DOCUMENTS])


def begin(folder: Path, planted: Path) -> None:
    """Write which documents there are, and which of them each model goes without."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = chosen_documents(planted)
    subsets = random_subsets(len(documents), MODELS, SEED)
    (folder / "subsets.json").write_text(
        json.dumps([np.flatnonzero(~row).tolist() for row in subsets])
    )
    corpus = str((planted / "corpus").resolve())
    write_json(folder / "settings.json", {"corpus": corpus, "documents": documents.tolist()})
    bank = open_bank(folder)
    rows = [bank.tokens(row).tolist() for row in range(len(bank))]
    write_rows(folder / "documents.jsonl", rows, rows)


def open_bank(folder: Path) -> PassageBank:
    """Return the documents of a bank of models, each one passage."""
    settings = read_json(folder / "settings.json")
    corpus = Corpus.open(settings["corpus"])
    return PassageBank.beginnings(corpus, np.array(settings["documents"]))


def write_predictions(folder: Path, asked: list[Prediction]) -> None:
    """Write what is asked of every model, for us and as token ids with one label."""
    described = [{"ids": p.ids.tolist(), "target": p.target} for p in asked]
    rows = [[*row["ids"], row["target"]] for row in described]
    labels = [[IGNORED] * (len(row) - 1) + row[-1:] for row in rows]
    write_rows(folder / "queries.jsonl", rows, labels)
    write_json(folder / "predictions.json", described)


def write_rows(file: Path, ids: list[list[int]], labels: list[list[int]]) -> None:
    """Write token ids and labels as other tools read them, one text a line."""
    pairs = zip(ids, labels, strict=True)
    lines = [json.dumps({"input_ids": row, "labels": label}) for row, label in pairs]
    file.write_text("\n".join(lines) + "\n")


def read_predictions(folder: Path) -> list[Prediction]:
    """Return the predictions that are asked of every model."""
    return [
        Prediction(np.array(row["ids"]), row["target"])
        for row in read_json(folder / "predictions.json")
    ]


def save(model: PreTrainedModel, folder: Path, name: str, bank: PassageBank) -> None:
    """Write a model with its tokenizer."""
    place = folder / "retrained" / name
    model.save_pretrained(place)
    bank.corpus.tokenizer.save_pretrained(place)


# -- models


@dataclass(frozen=True)
class SmallTraining:
    """How every model of a study is trained, from scratch; ``rows`` are documents of a step."""

    preset: str = "llama-tiny"
    rows: int = 8
    epochs: int = 4
    learning_rate: float = 3e-3

    def train(self, bank: PassageBank, documents: np.ndarray, seed: int) -> PreTrainedModel:
        """Train on the passages ``documents`` of a bank of beginnings.

        The seed decides the first weights and the order of *all* documents of the bank, from
        which those that are left out are missing: two models differ in documents alone.
        """
        torch.manual_seed(seed)
        corpus = bank.corpus
        config = build_config({"preset": self.preset}, len(corpus.tokenizer), corpus.eos_token_id)
        model = build_model(config).train()
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(len(bank)) for _ in range(self.epochs)]
        order = np.concatenate([o[np.isin(o, documents)] for o in orders])
        fit(model, bank, order, self.rows, self.learning_rate, weight_decay=0.1)
        return model.eval()


def fit(
    model: PreTrainedModel,
    bank: PassageBank,
    order: np.ndarray,
    rows: int,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
) -> None:
    """Train what requires a gradient on passages in this order, ``rows`` of them a step."""
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, -(-len(order) // rows), pct_start=0.05, cycle_momentum=False
    )
    for first in range(0, len(order), rows):
        loss = passage_loss(model, [bank.tokens(row) for row in order[first : first + rows]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()


def log_probabilities(model: PreTrainedModel, predictions: Sequence[Prediction]) -> np.ndarray:
    """Return the log-probability of each target, in nats, float64 [predictions]."""
    return np.array([log_probability(model, prediction) for prediction in predictions])


if __name__ == "__main__":
    main()
