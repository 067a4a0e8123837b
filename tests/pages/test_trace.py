"""What the page of a trace holds, as data, and what a browser shows of it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import prismlm
from prismlm.corpus.pieces import visible
from prismlm.explain.subject import worth_showing
from prismlm.lens.cells import UNKNOWN, Keys
from prismlm.lens.lens import Around
from prismlm.pages.trace import Pool, fragment, page, trace_data
from tests.helpers.feedback_families import attach_drawn
from tests.helpers.html_reader import Reader
from tests.helpers.token_corpus import excerpt

TEXT = "The proof relies on\nthe theory of groups."
EVIL = "</script><script>alert(1)</script>"
LABELS = "all => all.map((one) => one.getAttribute('aria-label'))"


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain(TEXT, generate=3)


@pytest.fixture(scope="module")
def fed_back(tiny_model):
    """The reading of a model with uncertainty feedback."""
    lm = prismlm.load(tiny_model)
    attach_drawn(lm.model, 4096)
    return lm.explain(TEXT, generate=3)


def data_of(html):
    """Return the answers of a page, and what they share."""
    (block,) = Reader(html).blocks
    return block["answers"], block["shared"]


def one_of(trace, **options):
    """Return the data of a page of one trace, and what its lens shares."""
    (answer,), (shared,) = data_of(page([trace], **options))
    return answer, shared


def test_parts_in_the_page_sum_to_the_logits_and_shares_to_one(trace):
    data, _ = one_of(trace)
    assert len(data["steps"]) == len(trace)
    for shown, step in zip(data["steps"], trace, strict=True):
        total = sum(use[1] for use in shown["uses"]) + shown["residual"][0] + shown["bias"][0]
        assert total == pytest.approx(step.model_logit, abs=1e-3 * max(1, abs(step.model_logit)))
        assert shown["logit"] == pytest.approx(step.logit, rel=1e-5)
        evidence = sum(use[2] for use in shown["uses"])
        whole = evidence + shown["residual"][1] + shown["bias"][1]
        assert evidence / whole == pytest.approx(step.explained_share, rel=1e-3)
    groups = [group for step in data["steps"] for group in step["shares"]]
    assert [group["by"] for group in data["whole"]["shares"]] == ["domain", "source", "license"]
    for group in groups + data["whole"]["shares"]:
        total = sum(item["share"] for item in group["items"]) + group["others"][1]
        assert total + group["unattributed"] == pytest.approx(1, abs=1e-5)
    first = trace[0:1].sources("domain").items[0]
    shown = data["steps"][0]["shares"][0]["items"][0]
    assert shown["key"] == first.key
    figures = [first.share, first.base_rate]
    assert [shown["share"], shown["base_rate"]] == pytest.approx(figures, rel=1e-5)


def test_what_the_lens_does_not_know_has_no_shares(lm, monkeypatch):
    cells, known = lm.lens.cells, lm.lens.cells.keys
    unknown = Keys([UNKNOWN], np.zeros(len(cells.starts), int))
    monkeypatch.setattr(cells, "keys", lambda by: unknown if by == "domain" else known(by))
    data = trace_data(lm.explain("The proof relies on"), Pool(lm.lens))
    assert [group["by"] for group in data["whole"]["shares"]] == ["source", "license"]
    assert all([group["by"] for group in step["shares"]] == ["source"] for step in data["steps"])


def test_quotes_and_what_speaks_against_are_in_the_page(lm):
    text = "".join(excerpt(lm.lens.corpus, int(lm.lens.corpus.starts[i]), 20) for i in (3, 40))
    trace = lm.explain(text)
    data, shared = one_of(trace, against=4)
    whole = data["whole"]
    quotes = trace.verbatim(6)
    assert quotes[0].length >= 19
    assert [(q["text"], q["length"], q["count"]) for q in whole["verbatim"]] == [
        (q.text, q.length, q.count) for q in quotes
    ]
    assert whole["verbatim"][0]["place"]["doc_id"] == quotes[0].places[0]["doc_id"]
    documents = worth_showing(trace.documents(50), 5)
    assert 1 < len(documents) < 5
    for one, document in zip(whole["documents"], documents, strict=True):
        assert one["share"] == pytest.approx(document.share, rel=1e-5)
    marked = 0
    passages = {passage.position: passage for passage in trace.passages(8)}
    for entry in (passage for one in whole["documents"] for passage in one["passages"]):
        before, _, after, _, position = shared["places"][entry["place"]]
        if position in passages:
            parts = [part if isinstance(part, list) else [part] for part in (before, after)]
            pieces = [piece for pieces in parts for piece in pieces[1::2] if piece]
            text = passages[position].text
            assert pieces == [text[begin:end] for begin, end in passages[position].also]
            marked += len(pieces)
    assert marked
    for shown, passage in zip(whole["against"], trace.against(4), strict=True):
        assert shown["share"] == pytest.approx(passage.share, rel=1e-5)
        assert shown["predicted"] == visible(passage.predicted)
        assert shown["probability"] == pytest.approx(passage.probability, rel=1e-5)
        *words, document, position = shared["places"][shown["place"]]
        assert ["".join(word) for word in words] == list(passage.around)
        assert position == passage.position
        assert shared["documents"][document]["doc_id"] == passage.doc_id
    assert "against" not in one_of(trace)[0]["whole"]


def test_contexts_are_the_index_and_held_once(trace):
    answers, (shared,) = data_of(page([trace, trace]))
    assert answers[0] == answers[1]
    assert [shared] == data_of(page([trace]))[1]
    for name in ("places", "documents"):
        listed = [json.dumps(one) for one in shared[name]]
        assert len(set(listed)) == len(listed) > 0
    shown = {int(n): one[3] for n, one in shared["prototypes"].items() if len(one) == 4}
    assert 0 < len(shown) < len(shared["prototypes"])
    for number, contexts in shown.items():
        rows = trace.lens.rows_of(number)
        nearest = trace.lens.index.slice(rows.start, min(3, rows.stop - rows.start)).to_pylist()
        for row, place in zip(nearest, contexts, strict=True):
            before, token, after, document, position = shared["places"][place]
            names = ("before", "token", "after", "position")
            assert [before, token, after, position] == [row[name] for name in names]
            known = shared["documents"][document]
            assert all(known[key] == row[key] for key in ("doc_id", "source", "license", "title"))


def test_without_a_lens_or_its_scale_the_page_says_so(lm, trace, monkeypatch):
    data, shared = one_of(replace(trace, lm=replace(trace.lm, lens=None)))
    assert (data["whole"], shared["places"]) == (None, [])
    assert all(step["shares"] == [] for step in data["steps"])
    assert "has no lens" in data["support"]["sentence"]
    monkeypatch.setitem(lm.lens.__dict__, "support", None)
    data, _ = one_of(lm.explain("The proof relies on", generate=2))
    assert "is not known: the lens has no scale of support" in data["support"]["sentence"]


def test_marks_of_direction_are_shown_and_turn_nothing(lm, monkeypatch):
    mark = "\u202e"
    around = Around(f"a{mark}b", f" {mark}c", f"d{mark}")
    monkeypatch.setattr(lm.lens, "sentence", lambda position: around)
    names = [f"cat{mark}egory" for _ in lm.lens.names]
    monkeypatch.setitem(lm.lens.__dict__, "names", names)
    trace = lm.explain(f"The proof {mark}relies on")
    code = f"‹U+{ord(mark):04X}›"
    for html in (page([trace], title=f"A {mark}title"), fragment(trace)):
        assert mark not in html
        ((data,), (shared,)) = data_of(html)
        assert f"cat{code}egory" in html
        assert code in "".join(data["tokens"])
        assert [f"a{code}b", f" {code}c", f"d{code}"] in [p[:3] for p in shared["places"]]
    assert f"<title>A {code}title</title>" in page([trace], title=f"A {mark}title")


def test_a_person_reads_a_page(opened, trace):
    with opened(page([trace], title="A reading", against=2)) as tab:
        assert tab.locator("h1").inner_text() == "A reading"
        parts = (".p-question", ".p-answer", ".p-support", ".p-grouped", ".p-shares", ".p-against")
        tops = [tab.locator(f"{one}").first.bounding_box()["y"] for one in parts]
        assert tops == sorted(tops)
        assert tab.inner_text(".p-answer") == trace.answer.strip()
        assert tab.inner_text(".p-support") == trace.support.sentence
        whole = tab.inner_text(".p-whole")
        for passage in trace.against(2):
            assert f"instead of {visible(passage.predicted)}, to which the model" in whole
        assert tab.locator(".p-verbatim q").count() == len(trace.verbatim(6))
        tab.click(".p-tokens > summary")
        labels = tab.locator(".p-text [role=option]").evaluate_all(LABELS)
        for label, step in zip(labels, trace, strict=True):
            leading = max(step.prototypes, key=lambda use: use.evidence)
            assert leading.name in label
            assert "fed back" not in label
        assert tab.locator(".p-written").count() == tab.locator(".x-column").count() == 3
        # On the last token, with every prototype of it: five rows, and one that opens.
        last = trace[-1]
        assert f"{last.logit:.3f}".replace("-", "−") in tab.inner_text(".p-equation")
        assert f"{len(last.prototypes) - 5} more" in tab.inner_text(".p-uses")
        assert tab.locator(".p-aside .p-passage").count() == len(trace[-1:].passages(3))
        tab.keyboard.press("Home")
        tab.locator(".p-text [role=option]").first.click()
        assert tab.inner_text(".p-title h2").startswith(visible(trace[0].pieces[0].label))
        tab.locator(".x-slice[data-prototype]").first.hover()
        tab.wait_for_selector(".x-hover mark")
        assert trace.lens.name in tab.inner_text(".p-caveat")
        assert tab.locator(".x-exports").count() == 0


def test_what_was_fed_back_is_shown_where_there_is_feedback(opened, fed_back):
    data, _ = one_of(fed_back)
    assert "fed" not in data["steps"][0]
    for shown, step in list(zip(data["steps"], fed_back, strict=True))[1:]:
        share, code = shown["fed"]
        assert share == pytest.approx(step.uncertainty, rel=1e-5)
        assert step.uncertainty == pytest.approx(code / 4095)
        assert 0 < code < 4096
    with opened(page([fed_back])) as tab:
        labels = tab.locator(".p-text [role=option]").evaluate_all(LABELS)
        assert labels[0].endswith("fed back: nothing")
        codes = [step.uncertainty_code for step in fed_back][1:]
        for label, code in zip(labels[1:], codes, strict=True):
            assert label.endswith(f"code {code:,}")
        tab.click(".p-tokens > summary")
        assert f"fed back, code {codes[-1]:,}" in tab.inner_text(".p-figures")
        assert "uncertainty fed back to the token" in tab.inner_text(".p-legend")


def test_a_selection_of_a_special_token_is_not_an_answer_without_words(lm, monkeypatch):
    trace = lm.explain("The proof relies on", generate=2)
    monkeypatch.setattr(type(trace), "answer", property(lambda _: ""))
    token = visible(trace.steps[-1].pieces[1].label)
    assert trace_data(trace[-1:], Pool(lm.lens))["answer"] == token
    assert trace_data(trace, Pool(lm.lens))["answer"] == ""


def test_answers_without_support_words_or_steps(opened, lm, monkeypatch):
    trace = lm.explain("The proof relies on", generate=1)
    trace.__dict__["support"] = trace.support._replace(level="none")
    monkeypatch.setattr(type(trace), "answer", property(lambda _: " "))
    with opened(page([trace, trace[:0]])) as tab:
        assert tab.locator(".p-answer").all_inner_texts() == ["The model wrote nothing."] * 2
        # That nothing is about the answer comes first.
        parts = (".p-support", ".p-answer")
        tops = [tab.locator(part).first.bounding_box()["y"] for part in parts]
        assert tops == sorted(tops)
        assert not tab.locator(".p-passage").first.is_visible()
        tab.locator("text=Show the nearest passages anyway").first.click()
        assert tab.locator(".p-passage").first.is_visible()


def test_nothing_in_a_text_or_corpus_becomes_markup(opened, lm, monkeypatch):
    monkeypatch.setattr(lm.lens, "sentence", lambda position: Around(EVIL, EVIL, EVIL))
    monkeypatch.setitem(lm.lens.__dict__, "names", [EVIL for _ in lm.lens.names])
    evil = lm.explain(f"{EVIL} & <b>\u2028")
    with opened(page([evil], title=EVIL, against=2)) as tab:
        tab.click(".p-tokens > summary")
        # The one script is that of the data.
        assert tab.locator("main script").count() == 1
        assert tab.title() == EVIL
        # What was escaped is still there to be read.
        assert EVIL in tab.text_content(".p-whole")
        assert EVIL in tab.inner_text(".p-text")


def test_fragments_stand_alone_and_any_number_on_a_page(opened, lm, trace):
    other = lm.explain("Another text")
    assert fragment(trace) == trace._repr_html_()
    assert not Reader(fragment(trace)).all("html")
    with opened("<!doctype html>" + fragment(trace) + fragment(other) + fragment(trace)) as tab:
        answers = tab.locator(".p-answer").all_inner_texts()
        assert answers == [one.answer.strip() for one in (trace, other, trace)]
