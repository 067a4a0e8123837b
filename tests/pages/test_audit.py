"""The page of an audit, on a phone too."""

from __future__ import annotations

import pytest

import prismlm
from prismlm.corpus import Document
from prismlm.explain.audit import Audit
from prismlm.explain.texts import text_options
from prismlm.lens.text import Around
from prismlm.pages.audit import audit_page, told_apart

TURN = "\u202e"
ASKED = "You are a helpful assistant. Answer in one sentence. Question: "
TEXTS = [
    Document("answers/model-a/one", f"{ASKED}why did the court dismiss the appeal of the owner?"),
    Document("answers/model-a/two", f"{ASKED}what became of the girl who lived in the woods?"),
    Document("answers/model-a/three", f"{ASKED}which dose is given to children with a fever?"),
    Document(f"{TURN}other", f"The {TURN}proof relies on groups."),
]


@pytest.fixture(scope="module")
def summary(tiny_model):
    lm = prismlm.load(tiny_model)
    audit = Audit(lm, text_options([lm]))
    list(audit.read(TEXTS))
    value = audit.to_dict()
    value["documents"][0] |= {
        "title": f"A {TURN}title",
        "license": None,
        "source": None,
        "around": Around("the way\nto", " <school>", " was long"),
    }
    return value


def test_what_most_begin_with_is_cut_at_the_front():
    same = "The same long beginning of all: "
    assert told_apart([f"{same}one", f"{same}two", "another"]) == ["…one", "…two", "another"]
    # Too few, too short, or nothing left that tells them apart.
    assert told_apart([f"{same}one", "another", "third"]) == [f"{same}one", "another", "third"]
    assert told_apart(["The same one", "The same two"]) == ["The same one", "The same two"]
    assert told_apart([f"{same}one", f"{same}one"]) == ["…one", "…one"]
    assert told_apart([]) == []


def test_excerpts_are_marked_and_beginnings_cut(summary):
    page = audit_page(summary)
    assert "…the way\nto <mark>&lt;school&gt;</mark> was long…" in page
    assert page.count("<mark>") == sum(d["around"] is not None for d in summary["documents"])
    first = summary["least_attributed"][0]
    assert first["opening"].startswith(("The", ASKED))
    table = page[page.index("largest unattributed share") :]
    assert ASKED not in table
    assert "…why did the court dismiss the appeal" in table
    assert '<small title="answers/model-a/one">…one</small>' in table


def test_marks_of_direction_are_shown(summary):
    page = audit_page(summary)
    assert TURN not in page
    for shown in ("A ‹U+202E›title", "The ‹U+202E›proof", "‹U+202E›other"):
        assert shown in page
