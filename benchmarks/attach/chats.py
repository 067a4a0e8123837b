"""Chats that a model was fine-tuned on: does explain name the one that is asked about?

    python -m benchmarks.attach.pubmed_chats medical_pubmed.parquet --chats CHATS
    prismlm attach BASE --corpus CHATS --lora --weights cosine --prototypes 2048 --out MODEL
    python -m benchmarks.attach.chats MODEL CHATS

Questions of chats that the model was fine-tuned on are drawn and put to it as they stand there.
Where is the chat among the documents that its answer relies on? Evidence is of the answer alone,
so that the words of the question do not give the chat away. Beside it: BM25 with the words of the
same answer, and the documents of another question's answer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import prismlm
from benchmarks.attribution.retrieval import BM25
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Document
from prismlm.corpus.read import DocumentReader
from prismlm.explain.language_model import PrismLM
from prismlm.files import write_json


def main() -> None:
    """Ask, and write the ranks."""
    parser = script_options(__doc__, RESULTS / "chats.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_json(given.out, measure(prismlm.load(given.model), given))
    print(f"wrote {given.out}")


def measure(lm: PrismLM, given: argparse.Namespace) -> dict[str, Any]:
    """Return the rank of each question's own chat, by every method, from 1."""
    assert lm.lens is not None
    assert lm.lens.corpus is not None, "the corpus is not at hand"
    reader = DocumentReader(given.chats, tokenizer=lm.tokenizer)
    corpus = lm.lens.corpus
    trained = {corpus.doc_ids[number] for number in corpus.split("train")}
    chats = [document for document in reader if document.doc_id in trained]
    words = BM25([document.text for document in chats])
    generator = np.random.default_rng(given.seed)
    chosen = generator.permutation(len(chats))[: given.questions]
    rows: list[dict[str, Any]] = []
    for number in chosen.tolist():
        trace = _answered(lm, chats[number], given.tokens)
        shares = {one.doc_id: one.share for one in trace.documents(len(corpus))}
        steps = trace.steps[trace.first :]
        answer = lm.tokenizer.decode([step.target_id for step in steps], skip_special_tokens=True)
        found = {
            "explain": np.array([shares.get(chat.doc_id, 0.0) for chat in chats]),
            "BM25": words.scores(str(answer)),
        }
        rows.append({"chat": number, "answer": answer, "scores": found})
    asked = [
        {
            "question": chats[row["chat"]].opening,
            "answer": row["answer"],
            "explain": rank(row["scores"]["explain"], row["chat"]),
            "BM25": rank(row["scores"]["BM25"], row["chat"]),
            "another answer": rank(other["scores"]["explain"], row["chat"]),
        }
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    return {
        "environment": environment(),
        "chats": len(chats),
        "tokens": given.tokens,
        "trained_tokens": corpus.meta["counts"]["tokens"],
        "asked": asked,
    }


def _answered(lm: PrismLM, chat: Document, tokens: int) -> prismlm.Trace:
    assert chat.messages is not None
    return lm.explain(list(chat.messages[:-1]), generate=tokens)


def rank(scores: np.ndarray, own: int) -> float:
    """Return the rank of one document, from 1: in the middle of those with an equal score."""
    above, equal = int((scores > scores[own]).sum()), int((scores == scores[own]).sum())
    return above + (equal + 1) / 2


if __name__ == "__main__":
    main()
