"""Ask a model trained on planted facts where it has them from; write docs/results/attribution.json.

    python -m benchmarks.attribution.planted_model planted   # with --every 2 --epochs 1: a quarter
    python -m benchmarks.attribution.measure planted
    python -m benchmarks.attribution.render

Each fact is asked for twice: in a wording that no document has, and, as a check on the machinery,
in the words of one of its own documents. Documents are found by attribution (the shares that
`trace.documents` gives for the predictions of the answer), by the measure of PRISM, by controls
(random hidden states as prototypes; a shuffled prototype → document map), by hidden states alone,
and by words (BM25).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import prismlm
from benchmarks.attribution.domain_prompts import against_controls, prompt_evidence
from benchmarks.attribution.retrieval import BM25, nearest_cosines
from benchmarks.first_light.measure import SHUFFLES, random_states_head
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.eval.planted_facts import chance_recall, recall
from prismlm.explain.shares import Method
from prismlm.files import read_json, write_json
from prismlm.index.build import IndexOptions, build_index
from prismlm.index.lens import Lens
from prismlm.models.sidecar import load_sidecar
from prismlm.statistics import paired_difference

LIMIT = 10
PROMPT_TOKENS = (8, 32, 128)
RANKS = ((1, 10), (11, 100), (101, None))


@dataclass(frozen=True)
class Question:
    """A text that an answer completes, and the documents that it should lead to.

    Attributes:
        text: what comes before the answer.
        answer: one word.
        candidates: the answers that could have been.
        documents: ids of the planted documents.
        copies: how many documents hold the fact.
    """

    text: str
    answer: str
    candidates: tuple[str, ...]
    documents: tuple[str, ...]
    copies: int

    @property
    def answered(self) -> str:
        """The text with its answer."""
        return f"{self.text} {self.answer}"


def main() -> None:
    """Run the measurement."""
    parser = script_options(__doc__, RESULTS / "attribution.json")
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    arguments = parser.parse_args()
    lm = prismlm.load(arguments.planted / "model")
    corpus = Corpus.open(arguments.planted / "corpus")
    planted = read_json(arguments.planted / "facts.json")
    control = random_states_model(lm, corpus, arguments.planted / "random-states")
    questions = wordings(planted["facts"])
    rows = ask(lm, control, corpus, [*questions["held_out"], *questions["verbatim"]])
    split = len(questions["held_out"])
    result = {
        "environment": environment(),
        "setting": setting(lm, corpus, planted),
        "wordings": {
            "held_out": {"summary": summary(rows[:split]), "questions": rows[:split]},
            "verbatim": {"summary": summary(rows[split:]), "questions": rows[split:]},
        },
        "domain_prompts": domain_prompts(lm, control, corpus),
    }
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def setting(lm: prismlm.PrismLM, corpus: Corpus, planted: dict[str, Any]) -> dict[str, Any]:
    """Return what was trained on what."""
    provenance = load_sidecar(lm.path).provenance
    recipe = {key: provenance["recipe"][key] for key in ("seed", "model", "head", "batch_size")}
    assert lm.lens is not None
    meta = lm.lens.meta
    fact = planted["facts"][-1]
    return {
        "recipe": recipe,
        "steps": provenance["steps"],
        "training_tokens": provenance["tokens"],
        "corpus": corpus.meta["counts"] | {"heldout": corpus.meta["heldout"]},
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "lens": {"contexts": meta.contexts, "window": meta.window, "stride": meta.stride},
        "options": planted["options"],
        "facts": len(planted["facts"]),
        "planted_documents": sum(len(fact["documents"]) for fact in planted["facts"]),
        "training_documents": len(corpus.split("train")),
        "example": {
            "prompt": fact["prompt"],
            "answer": fact["answer"],
            "document": corpus.text(corpus.find(fact["documents"][0]["doc_id"])),
        },
    }


def wordings(facts: Sequence[dict[str, Any]]) -> dict[str, list[Question]]:
    """Return the questions: in a new wording, and in the words of one of the documents."""
    held_out: list[Question] = []
    verbatim: list[Question] = []
    for fact in facts:
        answer, candidates, copies = fact["answer"], tuple(fact["candidates"]), fact["copies"]
        ids = tuple(place["doc_id"] for place in fact["documents"])
        held_out.append(Question(fact["prompt"], answer, candidates, ids, copies))
        text = fact["documents"][0]["prefix"]
        verbatim.append(Question(text, answer, candidates, ids[:1], copies))
    return {"held_out": held_out, "verbatim": verbatim}


def random_states_model(lm: prismlm.PrismLM, corpus: Corpus, lens: Path) -> prismlm.PrismLM:
    """Return the control: the same model beside K random training states, with their own index.

    The states are drawn by seed, so an index that is there already is theirs, or refused as stale.
    """
    assert lm.lens is not None
    head = random_states_head(lm, corpus)
    meta = lm.lens.meta
    options = IndexOptions(meta.contexts, meta.window, meta.stride, with_text=False)
    if not lens.exists():
        print("indexing random states as prototypes")
        build_index(lm.model, head, corpus, lens, options)
    return replace(lm, head=head, lens=Lens.open(lens, lm.model, head))


def ask(
    lm: prismlm.PrismLM, control: prismlm.PrismLM, corpus: Corpus, questions: Sequence[Question]
) -> list[dict[str, Any]]:
    """Return what every method finds for every question."""
    print(f"asking {len(questions)} questions")
    traces = [answer_steps(lm, question) for question in questions]
    found: dict[str, list[float]] = {
        "attribution": recalls(questions, [documents(trace) for trace in traces]),
        "source_measure": recalls(questions, [documents(trace, "source") for trace in traces]),
        "random_states": recalls(
            questions, [documents(answer_steps(control, question)) for question in questions]
        ),
        "shuffled_map": shuffled_recalls(questions, traces),
        **retrieved(lm, corpus, questions, traces),
        "chance": [
            chance_recall(len(corpus.split("train")), len(question.documents), LIMIT)
            for question in questions
        ],
    }
    assert lm.lens is not None
    kept = set(lm.lens.documents[0])
    rows: list[dict[str, Any]] = []
    for number, (question, trace) in enumerate(zip(questions, traces, strict=True)):
        planted = set(question.documents)
        rows.append(
            {
                "copies": question.copies,
                **knowledge(lm, question),
                "explained_share": float(np.mean([step.explained_share for step in trace])),
                "in_index": len(planted & kept) / len(planted),
                "within_reach": recall_within(reach(trace), planted),
                "recall": {method: values[number] for method, values in found.items()},
            }
        )
    return rows


def answer_steps(lm: prismlm.PrismLM, question: Question) -> prismlm.Trace:
    """Return the steps whose targets are the tokens of the answer."""
    trace = lm.explain(question.answered)
    first = len(token_ids(lm, question.text)) - 1
    return trace[first : len(trace) - 1]


def token_ids(lm: prismlm.PrismLM, text: str) -> list[int]:
    """Return the tokens of a text as ``explain`` reads it."""
    return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])


def documents(trace: prismlm.Trace, method: Method = "evidence") -> list[str]:
    """Return the ids of the documents with the largest shares."""
    return [share.doc_id for share in trace.documents(LIMIT, method=method)]


def recalls(questions: Sequence[Question], found: Sequence[Sequence[str]]) -> list[float]:
    """Return each question's recall."""
    pairs = zip(questions, found, strict=True)
    return [recall(ids, question.documents, LIMIT) for question, ids in pairs]


def shuffled_recalls(questions: Sequence[Question], traces: Sequence[prismlm.Trace]) -> list[float]:
    """Return the control's recall, the mean of :data:`SHUFFLES`: contexts of other prototypes."""
    total = np.zeros(len(questions))
    lens = traces[0].lens
    assert lens is not None
    for seed in range(SHUFFLES):
        order = np.random.default_rng(seed).permutation(lens.num_prototypes)
        moved = [documents(with_contexts_of(trace, order)) for trace in traces]
        total += recalls(questions, moved)
    return (total / SHUFFLES).tolist()


def with_contexts_of(trace: prismlm.Trace, order: np.ndarray) -> prismlm.Trace:
    """Return the trace with the evidence of prototype i given to prototype ``order[i]``."""
    moved = torch.from_numpy(order)[trace.table.indices]
    return replace(trace, table=replace(trace.table, indices=moved))


def retrieved(
    lm: prismlm.PrismLM,
    corpus: Corpus,
    questions: Sequence[Question],
    traces: Sequence[prismlm.Trace],
) -> dict[str, list[float]]:
    """Return the recall of hidden states alone, and of words without and with the answer."""
    assert lm.lens is not None
    numbers, ids = corpus.split("train"), corpus.doc_ids
    names = [ids[number] for number in numbers.tolist()]

    def best(scores: Callable[[int], np.ndarray]) -> list[float]:
        order = [np.argsort(-scores(i), kind="stable")[:LIMIT] for i in range(len(questions))]
        return recalls(questions, [[names[column] for column in row.tolist()] for row in order])

    states = torch.cat([trace.table.states for trace in traces])
    ends = np.cumsum([len(trace) for trace in traces])
    meta = lm.lens.meta
    cosines = nearest_cosines(
        lm.model, corpus, numbers, states, window=meta.window, stride=meta.stride
    )
    bm25 = BM25([corpus.text(number) for number in numbers.tolist()])
    return {
        "nearest_states": best(lambda i: cosines[ends[i] - len(traces[i]) : ends[i]].mean(0)),
        "bm25_prompt": best(lambda i: bm25.scores(questions[i].text)),
        "bm25_answered": best(lambda i: bm25.scores(questions[i].answered)),
    }


def reach(trace: prismlm.Trace) -> set[str]:
    """Return every document among the contexts of the prototypes that carry the answer."""
    lens = trace.lens
    assert lens is not None
    names, document_of_row = lens.documents
    used = {use.id for step in trace for use in step.prototypes if use.evidence > 0}
    numbers = [document_of_row[lens.rows_of(prototype)] for prototype in used]
    return {names[number] for number in np.unique(np.concatenate(numbers)).tolist()}


def recall_within(reached: set[str], planted: set[str]) -> float:
    """Return the recall of a perfect order of what is within reach."""
    return recall(sorted(reached & planted), planted, LIMIT)


@torch.no_grad()
def knowledge(lm: prismlm.PrismLM, question: Question) -> dict[str, Any]:
    """Return how well the model knows the answer.

    ``rank`` is that of the answer's first token in the vocabulary, from 1; ``probability`` is of
    the whole answer; ``first_of_candidates`` says whether no other candidate is likelier.
    """
    before = token_ids(lm, question.text)
    likelihood: dict[str, float] = {}
    rank = 0
    for candidate in question.candidates:
        ids = torch.tensor([token_ids(lm, f"{question.text} {candidate}")])
        logits = lm.model(input_ids=ids.to(lm.model.device), use_cache=False).logits[0].float()
        targets = ids[0, len(before) :]
        log_probabilities = logits[len(before) - 1 : -1].log_softmax(-1).cpu()
        chosen = log_probabilities.gather(1, targets[:, None])
        likelihood[candidate] = float(chosen.sum())
        if candidate == question.answer:
            rank = 1 + int((log_probabilities[0] > chosen[0]).sum())
    return {
        "rank": rank,
        "probability": float(np.exp(likelihood[question.answer])),
        "first_of_candidates": max(likelihood, key=lambda c: likelihood[c]) == question.answer,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise by copies, and by how well the answer is known."""
    levels = sorted({row["copies"] for row in rows})
    groups = {f"copies_{level}": [r for r in rows if r["copies"] == level] for level in levels}
    for low, high in RANKS:
        name = f"rank_{low}_{'on' if high is None else high}"
        groups[name] = [r for r in rows if low <= r["rank"] and (high is None or r["rank"] <= high)]
    groups["known"] = [row for row in rows if row["first_of_candidates"]]
    groups["all"] = list(rows)
    return {name: figures(group) for name, group in groups.items() if group}


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over some questions, with bootstrap intervals over facts."""
    recalled = {
        method: {i: row["recall"][method] for i, row in enumerate(rows)}
        for method in rows[0]["recall"]
    }
    nothing = dict.fromkeys(range(len(rows)), 0.0)
    return {
        "facts": len(rows),
        "median_rank": float(np.median([row["rank"] for row in rows])),
        "median_probability": float(np.median([row["probability"] for row in rows])),
        "explained_share": float(np.median([row["explained_share"] for row in rows])),
        "first_of_candidates": paired_difference(
            {i: row["first_of_candidates"] for i, row in enumerate(rows)}, nothing
        )._asdict(),
        "in_index": float(np.mean([row["in_index"] for row in rows])),
        "within_reach": float(np.mean([row["within_reach"] for row in rows])),
        "recall": {
            method: paired_difference(values, nothing)._asdict()
            for method, values in recalled.items()
        },
        "attribution_minus": {
            method: paired_difference(recalled["attribution"], values)._asdict()
            for method, values in recalled.items()
            if method != "attribution"
        },
    }


def domain_prompts(
    lm: prismlm.PrismLM, control: prismlm.PrismLM, corpus: Corpus
) -> list[dict[str, Any]]:
    """Return the domain shares of the first tokens of held-out documents, beside both controls."""
    assert lm.lens is not None
    assert control.lens is not None
    numbers, names = corpus.split("heldout"), corpus.column("domain")
    domains = [names[number] or "" for number in numbers.tolist()]
    maps = lm.lens.group_weights("domain"), control.lens.group_weights("domain")
    results: list[dict[str, Any]] = []
    for tokens in PROMPT_TOKENS:
        print(f"tracing prompts of {tokens} tokens to domains")
        trained, states = (
            prompt_evidence(asked.model, asked.head, asked.logit_map, corpus, numbers, tokens)
            for asked in (lm, control)
        )
        compared = against_controls((trained, maps[0]), (states, maps[1]), domains, SHUFFLES)
        results.append({"tokens": tokens, **compared})
    return results


if __name__ == "__main__":
    main()
