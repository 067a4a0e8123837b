"""The page of an audit in a browser, on a phone too."""

import pytest

from prismlm.corpus import Document
from prismlm.explain.audit import Audit
from prismlm.lens.lens import Around
from prismlm.pages.audit import audit_page
from tests.helpers.running import assert_fits_a_phone

TURN = "\u202e"
ASKED = "You are a helpful assistant. Answer in one sentence. Question: "
TEXTS = [
    Document("answers/model-a/one", f"{ASKED}why did the court dismiss the appeal of the owner?"),
    Document("answers/model-a/two", f"{ASKED}what became of the girl who lived in the woods?"),
    Document("answers/model-a/three", f"{ASKED}which dose is given to children with a fever?"),
    Document(f"{TURN}other", f"The {TURN}proof relies on groups."),
]


@pytest.fixture(scope="module")
def audit(lm):
    audit = Audit(lm)
    list(audit.read(TEXTS))
    return audit


def test_figures_documents_and_texts_that_stand_out(opened, audit):
    summary = audit.to_dict() | {"left_out": {"chat without an answer": 2}}
    summary["documents"][0] |= {
        "title": f"A {TURN}title",
        "license": None,
        "url": "javascript:alert(1)",
        "around": Around("the way\nto", " <school>", " was long"),
    }
    summary["least_supported"][0] |= {"level": "weak", "off_subject": True}
    with opened(audit_page(summary)) as tab:
        least = tab.locator(".p-block").first.locator("tbody tr").first
        assert "names nothing of the question" in least.inner_text()
        figure = tab.locator(".p-figure", has_text="predictions").locator("b")
        assert figure.inner_text() == str(summary["predictions"])
        keys = [one["key"] for one in summary["shares"]["source"]["items"]]
        bars = tab.locator(".p-columns-3 section").first.locator("li").all_inner_texts()
        assert [bar.split()[0] for bar in bars[:12]] == keys[:12]
        assert bars[12].startswith(f"{len(keys) - 12} more")
        assert "Left out: chat without an answer: 2." in tab.inner_text("main")
        first = tab.locator(".p-documents li").first
        assert first.locator("mark").inner_text() == "<school>"
        assert "A ‹U+202E›title" in first.inner_text()
        assert first.locator("a").count() == 0
        assert_fits_a_phone(tab)


def test_a_filter_and_a_lens_without_a_scale(opened, audit):
    one = Audit(audit.lm, where={"domain": "law"})
    list(one.read(TEXTS[:2]))
    summary = one.to_dict() | {"support": None, "least_supported": []}
    with opened(audit_page(summary)) as tab:
        assert "elsewhere" in tab.inner_text(".p-columns-3")
        assert "only domain" in tab.inner_text(".p-head")
        assert "matching" in tab.inner_text(".p-figures")
        assert tab.locator(".p-block h2").first.inner_text() == "Texts that rely most on domain law"
