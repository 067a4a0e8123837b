"""Ranks of the chats that are asked about, by hand and on a tiny model."""

import argparse
import json

import numpy as np

import prismlm
from benchmarks.attach.chats import measure, rank
from benchmarks.attach.pubmed_chats import chats
from tests.helpers.chats import ANSWER, QUESTION, chatting


def test_a_rank_is_in_the_middle_of_its_equals():
    scores = np.array([0.2, 0.5, 0.0, 0.0, 0.0])
    assert [rank(scores, number) for number in range(5)] == [2, 1, 4, 4, 4]


def test_chats_are_found_by_their_ids(tiny_model, tmp_path):
    lm = prismlm.load(chatting(tiny_model, tmp_path / "model"))
    ids = [lm.lens.corpus.doc_ids[number] for number in lm.lens.corpus.split("train")[:4]]
    rows = [
        {"id": name, "messages": [
            {"role": "user", "content": f"{QUESTION} {number}"},
            {"role": "assistant", "content": ANSWER},
        ]}
        for number, name in enumerate([*ids, "held out"])
    ]  # fmt: skip
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = argparse.Namespace(chats=chats, questions=3, tokens=4, seed=0)
    found = measure(lm, asked)
    assert (found["chats"], len(found["asked"])) == (4, 3)
    for row in found["asked"]:
        assert row["question"].startswith(QUESTION)
        messages = [{"role": "user", "content": row["question"]}]
        assert row["answer"] == lm.generate(messages, tokens=4)
        own = ids[int(row["question"][-1])]
        shares = {one.doc_id: one.share for one in lm.explain(messages, generate=4).documents(1000)}
        above = sum(shares.get(name, 0.0) > shares.get(own, 0.0) for name in ids)
        equal = sum(shares.get(name, 0.0) == shares.get(own, 0.0) for name in ids)
        assert row["explain"] == above + (equal + 1) / 2
    assert {row["question"][-1] for row in found["asked"]} <= set("0123")


def test_questions_with_long_enough_answers_become_chats():
    facts = {"source": "pubmedqa", "domain": "medical", "license": "MIT"}
    long = "It does. " * 120
    texts = (f"Why?\n\n{long}", "Why?\n\nSo.", f"No question\n\n{long}", f"{'W' * 200}?\n\n{long}")
    rows = [facts | {"id": str(n), "text": text, "url": None} for n, text in enumerate(texts)]
    (only,) = chats(rows)
    assert (only["id"], only["license"]) == ("0", "MIT")
    asked, answered = only["messages"]
    assert asked == {"role": "user", "content": "Why?"}
    assert answered["role"] == "assistant"
    assert answered["content"] == ("It does. " * 100).strip()
