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
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PASSAGE_TOKENS, PassageBank, Prediction
from benchmarks.attribution.judges.retraining import random_subsets
from benchmarks.attribution.judges.tail_patch import IGNORED
from benchmarks.attribution.questions import held_out_predictions
from benchmarks.attribution.small_models import SmallTraining, log_probabilities
from benchmarks.shared.options import script_options
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json


def main() -> None:
    """Train what is missing."""
    parser = script_options(__doc__)
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("bank", type=Path)
    parser.add_argument("--documents", type=int, default=1200)
    parser.add_argument("--predictions", type=int, default=120)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, training = args.bank, SmallTraining()
    if not (folder / "settings.json").exists():
        documents = chosen_documents(args.planted, args.documents, args.seed)
        begin(folder, args.planted, documents, args.models, args.seed)
    bank = open_bank(folder)
    everything = np.arange(len(bank))
    if not (folder / "predictions.json").exists():
        model = training.train(bank, everything, args.seed)
        save(model, folder, "base", bank)
        asked = held_out_predictions(
            model, bank.corpus, args.predictions, args.seed, tokens=PASSAGE_TOKENS
        )
        write_predictions(folder, bank, asked)
    predictions = read_predictions(folder)
    for number, left_out in enumerate(read_json(folder / "subsets.json")):
        output = folder / "outputs" / f"{number}.npy"
        if not output.exists():
            kept = np.setdiff1d(everything, left_out)
            model = training.train(bank, kept, args.seed)
            save(model, folder, f"subset_{number}", bank)
            output.parent.mkdir(exist_ok=True)
            np.save(output, log_probabilities(model, predictions))
            print(f"model {number} of {args.models}", flush=True)


def chosen_documents(planted: Path, count: int, seed: int) -> np.ndarray:
    """Return the numbers of random real documents of the training split, ascending."""
    corpus = Corpus.open(planted / "corpus")
    facts = read_json(planted / "facts.json")["facts"]
    invented = {place["doc_id"] for fact in facts for place in fact["documents"]}
    ids = corpus.doc_ids
    real = np.array([n for n in corpus.split("train").tolist() if ids[n] not in invented])
    return np.sort(np.random.default_rng(seed).permutation(real)[:count])


def begin(folder: Path, planted: Path, documents: np.ndarray, models: int, seed: int) -> None:
    """Write which documents there are, and which of them each model goes without."""
    folder.mkdir(parents=True, exist_ok=True)
    subsets = random_subsets(len(documents), models, seed)
    (folder / "subsets.json").write_text(
        json.dumps([np.flatnonzero(~row).tolist() for row in subsets])
    )
    corpus = str((planted / "corpus").resolve())
    settings = {"corpus": corpus, "documents": documents.tolist(), "seed": seed}
    write_json(folder / "settings.json", settings)
    bank = open_bank(folder)
    rows = [bank.tokens(row).tolist() for row in range(len(bank))]
    write_rows(folder / "documents.jsonl", rows, rows)


def open_bank(folder: Path) -> PassageBank:
    """Return the documents of a bank of models, each one passage."""
    settings = read_json(folder / "settings.json")
    corpus = Corpus.open(settings["corpus"])
    return PassageBank.beginnings(corpus, np.array(settings["documents"]))


def write_predictions(folder: Path, bank: PassageBank, asked: list[Prediction]) -> None:
    """Write what is asked of every model, for us and as token ids with one label."""
    described = [{"ids": p.ids.tolist(), "target": p.target, "document": p.document} for p in asked]
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
        Prediction(np.array(row["ids"]), row["target"], row["document"])
        for row in read_json(folder / "predictions.json")
    ]


def save(model: PreTrainedModel, folder: Path, name: str, bank: PassageBank) -> None:
    """Write a model with its tokenizer."""
    place = folder / "retrained" / name
    model.save_pretrained(place)
    bank.corpus.tokenizer.save_pretrained(place)


if __name__ == "__main__":
    main()
