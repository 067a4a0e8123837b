"""Does the demo's model answer, do its documents hold the answer, is support right? asked.json.

    python -m benchmarks.attribution.asked ask MODEL --half report
    python -m benchmarks.attribution.asked sheets --sheets FOLDER
    python -m benchmarks.attribution.asked judged --sheets FOLDER --reader "which model"

MODEL is the demo's; the questions are ``asked/questions.jsonl``, of which one half was for
choosing weights and bounds and the other is reported. ``sheets`` writes what a reader judges, mixed
and without saying by what it was found: answers beside the document that holds the answer, and the
passages behind the answers to the demo's own questions, by prismlm, with every token counting
alike, and by BM25. The reader is given ``asked/judge_prompt.md`` and answers a line each;
``judged`` takes that in.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import prismlm
from benchmarks.attach.demo_lessons import REPORTED, lines_of, wordings, words, written
from benchmarks.attribution.retrieval import BM25
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.chat import as_chat
from prismlm.demo.prompts import ANSWERED, QUESTIONS
from prismlm.demo.texts import pairs_path
from prismlm.explain.attribution import Attribution, added_up
from prismlm.explain.subject import CANDIDATES, worth_showing
from prismlm.files import json_text, read_json, write_json

FOLDER = RESULTS / "asked"
PASSAGES = 5
ORDERS = ("prismlm", "unweighted", "bm25")


def main() -> None:
    """Ask, write sheets, or take judgements."""
    parser = script_options(__doc__, RESULTS / "asked.json")
    parser.add_argument("part", choices=["ask", "sheets", "judged"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--half", choices=["choose", "report"], default="report")
    parser.add_argument("--sheets", type=Path, default=Path("sheets"))
    parser.add_argument("--reader", help="who judged")
    args = parser.parse_args()
    if args.part == "ask":
        write_json(args.out, ask(prismlm.load(args.model), args.half))
    elif args.part == "sheets":
        write_sheets(read_json(args.out), args.sheets)
    else:
        write_json(args.out, judged(read_json(args.out), args.sheets, args.reader))


def questions(half: str) -> list[dict[str, Any]]:
    """Return one half of the questions; of those that are reported, the ones in new words."""
    rows = [one for one in lines_of(REPORTED) if one["half"] == half]
    return in_new_words(rows) if half == "report" else rows


def in_new_words(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out questions that the shipped model was taught."""
    titles = set(pq.read_table(pairs_path())["title"].to_pylist())
    taught = [*map(wordings, titles), *written().values()]
    known = {words(question) for each in taught for question in each}
    return [row for row in rows if words(row["question"]) not in known]


def ask(lm: prismlm.PrismLM, half: str) -> dict[str, Any]:
    """Return answer, support and place of the document of every question, and passages."""
    search = Search(lm)
    rows: list[dict[str, Any]] = []
    for one in questions(half):
        trace = lm.explain(as_chat(one["question"]), generate=ANSWERED)
        answer = answer_of(trace)
        row = {**one, "answer": answer, "support": trace.support and trace.support.level}
        alone = trace.attribution().support()
        row["support_of_answer_alone"] = alone and alone.level
        if one["set"] == "answered":
            query = f"{one['question']} {answer}"
            ranks = {order: search.ranks(order, trace, query, one["id"]) for order in ORDERS}
            row["rank"] = {order: pair for order, (pair, _) in ranks.items()}
            row["page_rank"] = {order: page for order, (_, page) in ranks.items()}
            shown = worth_showing(trace.documents(CANDIDATES), PASSAGES, trace.subject)
            row["shown"] = [one.doc_id for one in shown]
            found = trace.passages(CANDIDATES)
            listed = worth_showing(found, CANDIDATES, trace.subject, fill=True)
            names = [*dict.fromkeys(one.doc_id for one in listed), one["id"]]
            row["rank"]["prismlm"] = names.index(one["id"]) + 1
            by_bm25 = [search.ids[i] for i in search.bm25.best(query, PASSAGES)]
            row["first_five"] = {"prismlm": names[:PASSAGES], "bm25": by_bm25}
        rows.append(row)
        print(len(rows), one["set"], trace.support and trace.support.level, flush=True)
    demo: list[dict[str, Any]] = []
    for topic, question in QUESTIONS.items():
        trace = lm.explain(as_chat(question), generate=ANSWERED)
        answer = answer_of(trace)
        row: dict[str, Any] = {"topic": topic, "question": question, "answer": answer}
        row["support"] = trace.support and trace.support.level
        query = f"{question} {answer}"
        row["passages"] = {order: search.passages(order, trace, query) for order in ORDERS}
        demo.append(row)
    return {"environment": environment(), "half": half, "questions": rows, "demo": demo}


def answer_of(trace: prismlm.Trace) -> str:
    """Return what the model wrote, without the mark of its end."""
    end = str(trace.lm and trace.lm.tokenizer.eos_token)
    written = "".join(step.pieces[1].shown for step in trace.steps[trace.first :])
    return written.removesuffix(end)


class Search:
    """Documents and passages behind an answer in three orders."""

    def __init__(self, lm: prismlm.PrismLM) -> None:
        lens = lm.lens
        assert lens is not None
        assert lens.cells is not None
        assert lens.corpus is not None
        self.lens, self.cells, self.corpus = lens, lens.cells, lens.corpus
        self.head = lm.head
        self.ids = lens.cells.documents.column("doc_id").to_pylist()
        number = {name: i for i, name in enumerate(lens.corpus.doc_ids)}
        self.texts = [lens.corpus.text(number[name]) for name in self.ids]
        self.titles = titles = lens.cells.documents.column("title").to_pylist()
        self.bm25 = BM25(self.texts)
        # Passages of BM25: lines, each below its document's title, as a reader sees it.
        self.lines = [
            (i, " ".join(line.split()))
            for i, text in enumerate(self.texts)
            for line in re.sub(r"<\|im_start\|>\w+|<\|im_end\|>", "", text).splitlines()
            if line.strip()
        ]
        self.bm25_of_lines = BM25([f"{titles[i]}\n{line}" for i, line in self.lines])
        # MedQuAD's pages have several pairs, each a document of the lens.
        names, self.page_of = np.unique([page_of(name) for name in self.ids], return_inverse=True)
        members = [np.flatnonzero(self.page_of == number) for number in range(len(names))]
        self.bm25_of_pages = BM25(["\n".join(self.texts[i] for i in some) for some in members])

    def attribution(self, order: str, trace: prismlm.Trace) -> Attribution:
        """Return the attribution of an answer, by prismlm or with all tokens alike."""
        attribution = trace[trace.first :].attribution()
        if order == "prismlm":
            return attribution
        carriers = trace.carriers()
        return replace(
            attribution,
            places=added_up(carriers.place, carriers.weight, carriers.cosine),
            rest=float(carriers.rest.sum()),
        )

    def ranks(self, order: str, trace: prismlm.Trace, query: str, document: str) -> tuple[int, int]:
        """Return the place of a document among all, from 1, and that of its page among pages.

        Those that are as good stand before it.
        """
        number = self.ids.index(document)
        if order == "bm25":
            both = self.bm25.scores(query), self.bm25_of_pages.scores(query)
        else:
            documents = self.attribution(order, trace).by_document
            scores = np.zeros(len(self.ids))
            scores[documents.number] = documents.value
            both = scores, np.bincount(self.page_of, scores)
        own = number, self.page_of[number]
        document_rank, page_rank = (int((s >= s[i]).sum()) for s, i in zip(both, own, strict=True))
        return document_rank, page_rank

    def passages(self, order: str, trace: prismlm.Trace, query: str) -> list[dict[str, Any]]:
        """Return the first five passages and those shown: document, share, title and sentence."""
        if order == "bm25":
            best = (self.lines[i] for i in self.bm25_of_lines.best(query, PASSAGES))
            return [
                {"doc_id": self.ids[i], "title": self.titles[i], "text": text[:400]}
                for i, text in best
            ]
        passages = self.attribution(order, trace).passages(CANDIDATES)
        shown = worth_showing(passages, PASSAGES, trace.subject)
        read = worth_showing(passages, PASSAGES, trace.subject, fill=True)
        texts = [" ".join(str(one.text).split()) for one in read]
        return [
            {"doc_id": one.doc_id, "title": one.title, "text": text, "shown": one in shown}
            for one, text in zip(read, texts, strict=True)
        ]


def page_of(name: str) -> str:
    """Return the page of MedQuAD that a document is from; other documents are their own."""
    return name.split("#")[0]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def _passage_key(row: dict[str, Any], one: dict[str, Any]) -> str:
    return _key(row["question"], one["title"] or "", one["text"])


def answer_items(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the answers to judge by key, each beside what its document says."""
    pairs = {row["id"]: row["messages"] for row in pq.read_table(pairs_path()).to_pylist()}
    return {
        _key(row["question"], row["answer"]): {
            "question": row["question"],
            "document": f"{pairs[row['id']][0]['content']} {pairs[row['id']][1]['content']}",
            "answer": row["answer"],
        }
        for row in result["questions"]
        if row["set"] == "answered"
    }


def passage_items(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the passages to judge by key, each beside question and answer."""
    return {
        _passage_key(row, one): {
            "question": row["question"],
            "answer": row["answer"],
            "title": one["title"],
            "passage": one["text"],
        }
        for row in result["demo"]
        for order in ORDERS
        for one in row["passages"][order]
    }


def write_sheets(result: dict[str, Any], folder: Path) -> None:
    """Write what is to be judged, in an order of no meaning."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in (("answers", answer_items(result)), ("passages", passage_items(result))):
        lines = (json_text({"key": key, **items[key]}) + "\n" for key in sorted(items))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def judged(result: dict[str, Any], folder: Path, reader: str) -> dict[str, Any]:
    """Return the result with what a reader said, which is kept beside the questions."""
    files = sorted(folder.glob("judged-*.jsonl"))
    said = {one["key"]: bool(one["yes"]) for path in files for one in lines_of(path)}
    kept = "".join(json_text({"key": key, "yes": said[key]}) + "\n" for key in sorted(said))
    (FOLDER / "judged.jsonl").write_text(kept, encoding="utf-8")
    for row in result["questions"]:
        if row["set"] == "answered":
            row["states_the_facts"] = said[_key(row["question"], row["answer"])]
    for row in result["demo"]:
        for order in ORDERS:
            for one in row["passages"][order]:
                one["of_subject"] = said[_passage_key(row, one)]
    return result | {"reader": reader}


if __name__ == "__main__":
    main()
