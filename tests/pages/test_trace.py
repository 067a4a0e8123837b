"""What the page of a trace holds, as data, and what a browser shows of it."""

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
from tests.helpers.html_reader import Reader
from tests.helpers.small_models import attach_drawn
from tests.helpers.token_corpus import excerpt

TEXT = "The proof relies on\nthe theory of groups."
MARK, CODE = "\u202e", "‹U+202E›"
EVIL = "</script><script>alert(1)</script>"
LABELS = "all => all.map((one) => one.getAttribute('aria-label'))"


@pytest.fixture(scope="module")
def trace(lm):
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
    for shown, step in zip(data["steps"], trace, strict=True):
        total = sum(use[1] for use in shown["uses"]) + shown["residual"][0] + shown["bias"][0]
        assert total == pytest.approx(step.model_logit, abs=1e-3 * max(1, abs(step.model_logit)))
        assert shown["logit"] == pytest.approx(step.logit, rel=1e-5)
        evidence = sum(use[2] for use in shown["uses"])
        whole = evidence + shown["residual"][1] + shown["bias"][1]
        assert evidence / whole == pytest.approx(step.explained_share, rel=1e-3)
    whole = data["whole"]["shares"]
    assert [group["by"] for group in whole] == ["domain", "source", "license"]
    for group in [*whole, *(group for step in data["steps"] for group in step["shares"])]:
        total = sum(item["share"] for item in group["items"]) + group["others"][1]
        assert total + group["unattributed"] == pytest.approx(1, abs=1e-5)
    shown, first = data["steps"][0]["shares"][0]["items"][0], trace[:1].sources("domain").items[0]
    assert shown["key"] == first.key
    figures = [first.share, first.base_rate]
    assert [shown["share"], shown["base_rate"]] == pytest.approx(figures, rel=1e-5)


def test_what_a_lens_does_not_know_is_left_out_or_said(lm, trace, monkeypatch):
    cells, known = lm.lens.cells, lm.lens.cells.keys
    unknown = Keys([UNKNOWN], np.zeros(len(cells.starts), int))
    monkeypatch.setattr(cells, "keys", lambda by: unknown if by == "domain" else known(by))
    monkeypatch.setitem(lm.lens.__dict__, "support", None)
    data, _ = one_of(lm.explain("The proof relies on"))
    assert [group["by"] for group in data["whole"]["shares"]] == ["source", "license"]
    assert all([group["by"] for group in step["shares"]] == ["source"] for step in data["steps"])
    assert "is not known: the lens has no scale of support" in data["support"]["sentence"]
    data, shared = one_of(replace(trace, lm=replace(trace.lm, lens=None)))
    assert (data["whole"], shared["places"]) == (None, [])
    assert all(step["shares"] == [] for step in data["steps"])
    assert "has no lens" in data["support"]["sentence"]


def test_quotes_and_what_speaks_against_are_in_the_page(lm):
    starts = lm.lens.corpus.starts
    trace = lm.explain("".join(excerpt(lm.lens.corpus, int(starts[i]), 20) for i in (3, 40)))
    data, shared = one_of(trace, against=4)
    whole, quotes = data["whole"], trace.verbatim(6)
    assert quotes[0].length >= 19
    for shown, quote in zip(whole["verbatim"], quotes, strict=True):
        assert (shown["text"], shown["length"]) == (quote.text, quote.length)
        assert (shown["count"], shown["place"]) == (quote.count, quote.places[0])
    documents = worth_showing(trace.documents(50), 5)
    assert 1 < len(documents) < 5
    for one, document in zip(whole["documents"], documents, strict=True):
        assert one["share"] == pytest.approx(document.share, rel=1e-5)
    marked = []
    passages = {passage.position: passage for passage in trace.passages(8)}
    for entry in (passage for one in whole["documents"] for passage in one["passages"]):
        before, _, after, _, position = shared["places"][entry["place"]]
        if position in passages:
            # Of a list every second piece is marked.
            lists = [part for part in (before, after) if isinstance(part, list)]
            pieces = [piece for part in lists for piece in part[1::2] if piece]
            text, also = passages[position].text, passages[position].also
            assert pieces == [text[begin:end] for begin, end in also]
            marked += pieces
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
        assert len(set(map(json.dumps, shared[name]))) == len(shared[name]) > 0
    shown = {int(n): one[3] for n, one in shared["prototypes"].items() if len(one) == 4}
    assert 0 < len(shown) < len(shared["prototypes"])
    for number, contexts in shown.items():
        rows = trace.lens.rows_of(number)
        nearest = trace.lens.index.slice(rows.start, min(3, rows.stop - rows.start)).to_pylist()
        for row, place in zip(nearest, contexts, strict=True):
            *context, document, position = shared["places"][place]
            own = [row[name] for name in ("before", "token", "after", "position")]
            assert [*context, position] == own
            names = ("doc_id", "title", "source", "license", "url")
            assert shared["documents"][document] == {name: row[name] for name in names}


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


def test_what_was_fed_back_is_shown_where_there_is_feedback(opened, tiny_model):
    lm = prismlm.load(tiny_model)
    attach_drawn(lm.model, 4096)
    first, *steps = trace = lm.explain(TEXT, generate=3)
    first_shown, *shown = one_of(trace)[0]["steps"]
    assert first.uncertainty is None
    assert "fed" not in first_shown
    for one, step in zip(shown, steps, strict=True):
        share, code = one["fed"]
        assert share == pytest.approx(step.uncertainty, rel=1e-5)
        assert step.uncertainty == pytest.approx(code / 4095)
        assert code == step.uncertainty_code
        assert 0 < code < 4096
    with opened(page([trace])) as tab:
        labels = tab.locator(".p-text [role=option]").evaluate_all(LABELS)
        assert labels[0].endswith("fed back: nothing")
        for label, step in zip(labels[1:], steps, strict=True):
            assert label.endswith(f"code {step.uncertainty_code:,}")
        tab.click(".p-tokens > summary")
        assert f"fed back, code {steps[-1].uncertainty_code:,}" in tab.inner_text(".p-figures")
        assert "uncertainty fed back to the token" in tab.inner_text(".p-legend")


def test_answers_without_support_words_or_steps(opened, lm, monkeypatch):
    trace = lm.explain("The proof relies on", generate=1)
    trace.__dict__["support"] = trace.support._replace(level="none")
    monkeypatch.setattr(type(trace), "answer", property(lambda _: " "))
    # A selection of a special token is not an answer without words.
    token = visible(trace.steps[-1].pieces[1].label)
    assert trace_data(trace[-1:], Pool(lm.lens))["answer"] == token
    with opened(page([trace, trace[:0]])) as tab:
        assert tab.locator(".p-answer").all_inner_texts() == ["The model wrote nothing."] * 2
        # That nothing is about the answer comes first.
        parts = (".p-support", ".p-answer")
        tops = [tab.locator(part).first.bounding_box()["y"] for part in parts]
        assert tops == sorted(tops)
        assert not tab.locator(".p-passage").first.is_visible()
        tab.locator("text=Show the nearest passages anyway").first.click()
        assert tab.locator(".p-passage").first.is_visible()


def test_nothing_in_a_text_or_corpus_becomes_markup_or_turns_its_surroundings(
    opened, lm, monkeypatch
):
    evil, shown = EVIL + MARK, EVIL + CODE
    monkeypatch.setattr(lm.lens, "sentence", lambda position: Around(evil, evil, evil))
    monkeypatch.setitem(lm.lens.__dict__, "names", [evil for _ in lm.lens.names])
    trace = lm.explain(f"{evil} & <b>\u2028")
    html = page([trace], title=evil, against=2)
    for text in (html, fragment(trace)):
        assert MARK not in text
        ((data,), (shared,)) = data_of(text)
        assert shown in "".join(data["tokens"])
        assert [shown] * 3 in [place[:3] for place in shared["places"]]
        assert all(one[0] == shown for one in shared["prototypes"].values())
    with opened(html) as tab:
        tab.click(".p-tokens > summary")
        # The one script is that of the data.
        assert tab.locator("main script").count() == 1
        assert tab.title() == shown
        # What was escaped is still there to be read.
        assert shown in tab.text_content(".p-whole")
        assert shown in tab.inner_text(".p-text")


def test_fragments_stand_alone_and_any_number_on_a_page(opened, lm, trace):
    other = lm.explain("Another text")
    assert fragment(trace) == trace._repr_html_()
    assert not Reader(fragment(trace)).all("html")
    with opened("<!doctype html>" + fragment(trace) + fragment(other) + fragment(trace)) as tab:
        answers = tab.locator(".p-answer").all_inner_texts()
        assert answers == [one.answer.strip() for one in (trace, other, trace)]
