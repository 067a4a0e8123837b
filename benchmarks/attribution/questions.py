"""What is asked of every method: planted facts, held-out predictions, held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.attribution.judges.passages import PassageBank, Prediction, answer_predictions
from prismlm.corpus import Corpus

# At least so many tokens are read before a prediction that is asked about.
CONTEXT = 8
LIKELY = (0.02, 0.6)


class FactQuestions(NamedTuple):
    """Planted facts as predictions of the tokens of their answers.

    ``question`` is the number of each prediction's fact; ``planted`` are rows of the fact's
    documents.
    """

    predictions: list[Prediction]
    question: np.ndarray
    planted: list[np.ndarray]


def fact_questions(bank: PassageBank, facts: Sequence[dict[str, Any]]) -> FactQuestions:
    """Ask for facts as ``facts.json`` describes them."""
    corpus = bank.corpus
    number_of = {name: number for number, name in enumerate(corpus.doc_ids)}
    predictions: list[Prediction] = []
    question: list[int] = []
    planted: list[np.ndarray] = []
    for number, fact in enumerate(facts):
        before, whole = (
            corpus.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (fact["prompt"], f"{fact['prompt']} {fact['answer']}")
        )
        answer = answer_predictions(before, whole[len(before) :])
        predictions += answer
        question += [number] * len(answer)
        ids = np.array([number_of[place["doc_id"]] for place in fact["documents"]])
        planted.append(np.searchsorted(bank.documents, np.sort(ids)))
    return FactQuestions(predictions, np.array(question), planted)


def twin_recall(facts: Sequence[dict[str, Any]], limit: int = 10) -> np.ndarray:
    """Return the expected recall of documents of facts with the same attribute and answer.

    Of a method that knows what is asked and answered, but not of which place: ``limit`` documents
    drawn at random among all that hold this attribute with this answer, float64 [facts].
    """
    pairs = [(fact["attribute"], fact["answer"]) for fact in facts]
    held = [len(fact["documents"]) for fact in facts]
    alike = [sum(n for n, other in zip(held, pairs, strict=True) if other == p) for p in pairs]
    return np.array(
        [min(limit, a) * h / a / min(limit, h) for a, h in zip(alike, held, strict=True)]
    )


@torch.no_grad()
def held_out_predictions(
    model: PreTrainedModel,
    corpus: Corpus,
    count: int,
    seed: int,
    tokens: int = 256,
) -> list[Prediction]:
    """Draw predictions that a model half knows, at most one of each held-out document.

    The next token must have had a probability between the two of ``LIKELY``; the first ``tokens``
    tokens of a document are read. The seed draws documents, and a position in each.
    """
    generator = np.random.default_rng(seed)
    chosen: list[Prediction] = []
    for number in generator.permutation(corpus.split("heldout")).tolist():
        length = min(tokens, int(corpus.lengths[number]) - 1)
        if length <= CONTEXT or len(chosen) == count:
            continue
        ids = corpus.tokens(int(corpus.starts[number]), length).astype(np.int64)
        read = torch.from_numpy(ids)[None]
        logits = model(input_ids=read, use_cache=False).logits[0, :-1].float()
        own = logits.softmax(-1).gather(1, read[0, 1:, None])[:, 0].numpy()
        half_known = (own >= LIKELY[0]) & (own <= LIKELY[1])
        places = 1 + np.flatnonzero(half_known & (np.arange(1, length) >= CONTEXT))
        if len(places):
            place = int(generator.choice(places))
            chosen.append(Prediction(ids[:place], int(ids[place])))
    return chosen


def document_predictions(corpus: Corpus, number: int, tokens: int = 128) -> list[Prediction]:
    """Return every prediction within the first tokens of a document."""
    length = min(tokens, int(corpus.lengths[number]) - 1)
    ids = corpus.tokens(int(corpus.starts[number]), length).astype(np.int64)
    return answer_predictions(ids[:1].tolist(), ids[1:].tolist())
