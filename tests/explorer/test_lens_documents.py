"""Documents over real HTTP against the corpus itself, and opened at a place in a browser."""

import json
import shutil
from urllib.parse import quote, urlencode

import pytest

import prismlm
from prismlm.corpus import build_corpus
from prismlm.corpus.layout import is_held_out
from prismlm.direction_marks import marks_shown
from prismlm.explorer import lens
from prismlm.lens.build import IndexOptions, build_index
from tests.explorer.conftest import PROMPTS, Served, go
from tests.helpers.axe import problems

HURT = "document.title = 'hurt'"
ARABIC = "\u0645\u0631\u062d\u0628\u0627"
LINE = f"The council \u202eturns\u2066 this\x00 \x1b[31m and\x07 that: {ARABIC}.\n"
EVIL = f'Before.\n<script>{HURT}</script><img src=x onerror="{HURT}"> & 日本\n' + LINE * 40
EVIL_ID = "../../etc/passwd?at=1&x=<b>#d é%2F"
# Held out, so that it need not be indexed.
LONG_ID = next(name for n in range(999) if is_held_out(name := f"long-{n}", 0.05))
LONG = "".join(f"Sentence {n} of a long document \u202eends.\n" for n in range(6_000))


@pytest.fixture(scope="module")
def directory(tiny_model, tmp_path_factory):
    """A model whose corpus holds a hostile document and a long one."""
    base = tmp_path_factory.mktemp("documents")
    rows = [
        {"id": EVIL_ID, "text": EVIL, "title": "<i>\u202eevil", "url": "javascript:alert(1)"},
        {"id": LONG_ID, "text": LONG, "license": "CC0", "url": "https://example.org/a"},
        {"id": "plain", "text": "The river carries stones to the sea."},
    ]
    source = base / "documents.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = build_corpus(source, base / "corpus", tokenizer=tiny_model)
    model = base / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("lens"))
    lm = prismlm.load(model)
    options = IndexOptions(contexts=4, window=128, stride=96)
    build_index(lm.model, lm.head, corpus, model / "lens" / "sample", options)
    return base


@pytest.fixture(scope="module")
def lm(directory):
    return prismlm.load(directory / "model")


@pytest.fixture(scope="module")
def served(lm):
    with Served(lm) as server:
        yield server


def fetch(served, **query):
    status, _, body = served.ask("GET", f"/api/documents?{urlencode(query)}")
    return status, json.loads(body)


def test_a_document_is_that_of_the_corpus_with_its_token(served, lm):
    corpus = lm.lens.corpus
    number = corpus.find(EVIL_ID)
    start = int(corpus.starts[number])
    for offset in (0, 57, 400):
        status, data = fetch(served, id=EVIL_ID, at=start + offset)
        assert status == 200
        left, right = corpus.spans(number)[offset].tolist()
        parts = EVIL[:left], EVIL[left:right], EVIL[right:]
        assert data["parts"] == [marks_shown(part) for part in parts]
    fields = (data["doc_id"], data["title"], data["url"])
    assert fields == (EVIL_ID, "<i>‹U+202E›evil", "javascript:alert(1)")
    assert (data["tokens"], data["characters"]) == (int(corpus.lengths[number]), len(EVIL))
    assert fetch(served, id="plain")[1]["parts"] == ["The river carries stones to the sea."]


def test_a_long_document_is_shown_around_the_place(served, lm, monkeypatch):
    monkeypatch.setattr(lens, "MAX_CHARACTERS", 60_000)
    corpus = lm.lens.corpus
    number = corpus.find(LONG_ID)
    for offset in (0, int(corpus.lengths[number]) // 2, int(corpus.lengths[number]) - 2):
        _, data = fetch(served, id=LONG_ID, at=int(corpus.starts[number]) + offset)
        first, last = data["first"], data["last"]
        left, right = corpus.spans(number)[offset].tolist()
        assert first <= left < right <= last <= len(LONG)
        assert 60_000 <= last - first < 60_010
        assert "".join(data["parts"]) == marks_shown(LONG[first:last])
    assert data["url"] == "https://example.org/a"


def test_what_is_not_there(served):
    for words, query in (
        ("no document with the id", {"id": "/etc/passwd"}),
        ("its tokens are", {"id": "plain", "at": 10**9}),
    ):
        status, error = fetch(served, **query)
        assert status == 400
        assert words in error["error"]


def test_a_lens_whose_corpus_is_gone_says_what_to_do(directory):
    hidden = directory / "moved"
    (directory / "corpus").rename(hidden)
    try:
        with Served(prismlm.load(directory / "model")) as server:
            status, error = fetch(server, id="plain")
            model = server.json("GET", "/api/model")
            answer = server.answer(EVIL[:60], 2)
            against = server.json("GET", f"/api/answers/{answer['id']}/steps/3/against")
    finally:
        hidden.rename(directory / "corpus")
    assert status == 400
    assert "prismlm index" in error["error"]
    assert "or has changed, and documents are shown from it" in error["error"]
    assert (model["prompts"], model["texts"]) == (PROMPTS, {})
    # What speaks against a prediction is read in the lens's own tokens.
    assert (model["lens"]["corpus"], model["lens"]["readable"]) == (False, True)
    assert against["against"]


def open_at(page, doc_id, at):
    """Open a document, and see that its place is in view."""
    go(page, f"document/{quote(doc_id, safe='')}?at={at}")
    # Not that of the document which was open before.
    page.wait_for_selector(f'#place[title="position {at:,} of the corpus"]')
    box = page.locator("#place").bounding_box()
    assert 0 <= box["y"] < box["y"] + box["height"] <= page.viewport_size["height"]


def test_in_a_browser_text_is_inert_and_the_place_in_view(page, lm):
    corpus = lm.lens.corpus
    number = corpus.find(EVIL_ID)
    start, length = int(corpus.starts[number]), int(corpus.lengths[number])
    at = start + length - 30
    page.set_viewport_size({"width": 390, "height": 844})
    open_at(page, EVIL_ID, at)
    assert problems(page) == []
    assert page.text_content(".x-doc-text") == marks_shown(EVIL)
    left, right = corpus.spans(number)[at - start].tolist()
    assert page.locator("#place").text_content() == EVIL[left:right].strip()
    assert page.locator(".x-document :is(script, img, i)").count() == 0
    assert page.locator(".x-document .p-head a").count() == 0
    assert "hurt" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert EVIL_ID in page.inner_text(".x-command")
    # Another place of the same document.
    open_at(page, EVIL_ID, start + 3)
