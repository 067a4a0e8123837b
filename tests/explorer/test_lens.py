"""Prototypes, the map and documents over real HTTP, against the lens, and in a real browser."""

import json
import re
import shutil
from dataclasses import replace
from urllib.parse import quote, urlencode

import pytest

import prismlm
from prismlm.corpus import build_corpus
from prismlm.corpus.layout import is_held_out
from prismlm.direction_marks import marks_shown
from prismlm.explorer import lens
from prismlm.lens import layout
from prismlm.lens.build import IndexOptions, build_index
from tests.explorer.conftest import HOSTILE, PROMPTS, Served, go, visited
from tests.helpers.lens_files import ACROSS, CATEGORIES, name_by_hand
from tests.helpers.running import assert_accessible, assert_fits_a_phone


@pytest.fixture(scope="module")
def served(named):
    return named


def test_names_that_are_written_meanwhile_are_seen_when_the_page_is_opened(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    search = "/api/prototypes?query=word117&all=1"
    with Served(prismlm.load(directory)) as server:
        assert server.json("GET", "/api/model")["lens"]["map"] is False
        assert f"prismlm map {directory}" in server.refused("GET", "/api/map")
        assert server.json("GET", search)["total"] == 0
        name_by_hand(prismlm.load(directory))
        assert server.json("GET", "/api/model")["lens"]["map"] is True
        assert "word117 → next117" in server.json("GET", "/api/map")["names"]
        assert server.json("GET", search)["items"][0]["id"] == 117
        lens = prismlm.load(directory).lens
        layout.write_meta(lens.path, replace(lens.meta, tokens=1, map=None))
        assert "rebuilt or removed" in server.refused("GET", "/api/model", expected=409)


def test_searches_filters_orders_and_the_place_of_one(served, lm):
    def found(query):
        return served.json("GET", f"/api/prototypes?{query}")

    context = next(one for one in lm.lens.index.to_pylist() if one["after"])
    words = "+".join(sorted(context["after"].split(), key=len)[-2:])
    items = found(f"query={words}&limit=500&all=1")["items"]
    assert context["prototype"] in [one["id"] for one in items]
    assert found("query=nosuchwordanywhere")["total"] == 0
    count = lm.lens.num_prototypes
    both = found("sort=id&at=117&limit=1&all=1")
    assert (both["total"], both["place"]) == (count, 117)
    assert both["categories"] == dict.fromkeys(CATEGORIES, count // 2)
    odd = found("category=Morphology&all=1&sort=id&at=117&first=58&limit=1")
    assert (odd["total"], odd["matching"], odd["place"]) == (count // 2, count, 58)
    assert odd["items"][0]["id"] == 117
    assert found("category=Morphology&all=1&at=0")["place"] is None
    items = found("limit=500&sort=usage&all=1")["items"]
    usages = [one["usage"] for one in items]
    assert usages == sorted(usages, reverse=True)
    # Those of few places are not listed unless they are asked for.
    few = [one["id"] for one in items if one["positions"] < 10]
    usual = found(f"limit=500&sort=usage&at={few[0]}")
    assert usual["items"] == [one for one in items if one["positions"] >= 10]
    assert (usual["total"], usual["place"]) == (count - len(few), None)


def test_a_person_pages_and_shares_what_is_seen(page, lm):
    title = page.locator(".x-card[data-chosen] h2")
    go(page, "prototypes/0")
    title.wait_for()
    assert title.inner_text() == marks_shown(HOSTILE)
    assert_accessible(page)
    page.get_by_label("of few places too").check()
    page.get_by_label("Search names").fill("word1")
    page.wait_for_url(re.compile("q=word1&|q=word1$"))
    page.locator(".x-chip", has_text="Morphology").click()
    page.wait_for_url(re.compile("category=Morphology"))
    page.get_by_label("sort by").select_option("id")
    page.wait_for_url(re.compile("sort=id"))
    odd = [i for i in range(lm.lens.num_prototypes) if i % 2 and str(i).startswith("1")]
    page.get_by_text(f"1 of {len(odd)}", exact=True).wait_for()
    page.locator(".x-stage").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Previous prototype").click()
    page.wait_for_url(re.compile(rf"#/prototypes/{odd[1]}\?"))
    assert title.inner_text() == f"word{odd[1]} → next{odd[1]}"
    page.keyboard.press("End")
    page.wait_for_url(re.compile(rf"#/prototypes/{odd[-1]}\?"))
    # What was shared opens at the same card, of the same list.
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    title.wait_for()
    assert title.inner_text() == f"word{odd[-1]} → next{odd[-1]}"
    assert_fits_a_phone(page)


# -- the map


def spot(page, number, count):
    """Return where a prototype of the grid is on the screen while all of it is shown."""
    box = page.locator(".x-over").bounding_box()
    down = count // ACROSS - 1
    scale = 0.94 * min(box["width"] / (ACROSS - 1), box["height"] / down)
    x = box["x"] + box["width"] / 2 + (number % ACROSS - (ACROSS - 1) / 2) * scale
    return x, box["y"] + box["height"] / 2 + (number // ACROSS - down / 2) * scale


def test_places_are_those_of_the_lens_and_a_lasso_shows_what_an_area_has(page, served, lm):
    data, table, count = served.json("GET", "/api/map"), lm.lens.prototypes, lm.lens.num_prototypes
    for name in ("x", "y"):
        assert data[name] == pytest.approx(table[name].to_pylist(), abs=1e-3)
    assert data["leading"] == lm.lens.by_size.tolist()
    assert data["listed"] == (lm.lens.cell_sizes >= 10).tolist()
    assert data["names"] == [marks_shown(name) for name in lm.lens.names]
    named = [data["categories"][number]["name"] for number in data["category"]]
    assert named == lm.lens.categories
    go(page, "map")
    page.get_by_role("button", name="Few places", pressed=False).click()
    # Around 17, 18, 19 and those below them, by half a step.
    (left, top), (right, below) = spot(page, 17, count), spot(page, 19 + ACROSS, count)
    half = (right - left) / 4
    left, top, right, below = left - half, top - half, right + half, below + half
    page.keyboard.down("Shift")
    page.mouse.move(left, top)
    page.mouse.down()
    for corner in ((right, top), (right, below), (left, below)):
        page.mouse.move(*corner, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    side = page.locator(".x-side")
    inside = [17, 18, 19, 17 + ACROSS, 18 + ACROSS, 19 + ACROSS]
    assert side.locator("h2").inner_text() == "6 prototypes"
    assert_accessible(page)
    names = side.locator(".x-found").all_inner_texts()
    assert sorted(names) == sorted(f"word{i} → next{i}" for i in inside)
    bar = side.locator(".p-bars li", has_text=CATEGORIES[1])
    odd = sum(i % 2 for i in inside)
    assert bar.locator(".p-number").inner_text() == f"{100 * odd / 6:.0f} %"
    assert bar.get_attribute("title") == f"Morphology: {odd} of 6; of all prototypes 96 of 192"
    side.locator(".x-found").first.click()
    side.locator(".x-kind").wait_for()


# -- documents

HURT = "document.title = 'hurt'"
LINE = "The council \u202eturns\u2066 this\x00 \x1b[31m and\x07 that: \u0645\u0631\u062d.\n"
EVIL = f'Before.\n<script>{HURT}</script><img src=x onerror="{HURT}"> & 日本\n' + LINE * 40
EVIL_ID = "../../etc/passwd?at=1&x=<b>#d é%2F"
# Held out, so that it need not be indexed.
LONG_ID = next(name for n in range(999) if is_held_out(name := f"long-{n}", 0.05))
LONG = "".join(f"Sentence {n} of a long document \u202eends.\n" for n in range(6_000))
PLAIN = "The river carries stones to the sea."


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """The explorer of a model whose corpus holds a hostile document and a long one."""
    base = tmp_path_factory.mktemp("documents")
    rows = [
        {"id": EVIL_ID, "text": EVIL, "title": "<i>\u202eevil", "url": "javascript:alert(1)"},
        {"id": LONG_ID, "text": LONG, "license": "CC0", "url": "https://example.org/a"},
        {"id": "plain", "text": PLAIN},
    ]
    source = base / "documents.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = build_corpus(source, base / "corpus", tokenizer=tiny_model)
    model = base / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("lens"))
    lm = prismlm.load(model)
    options = IndexOptions(contexts=4, window=128, stride=96)
    build_index(lm.model, lm.head, corpus, model / "lens" / "sample", options)
    with Served(prismlm.load(model)) as server:
        yield server


def path_of(doc_id, **query):
    return f"/api/documents?{urlencode({'id': doc_id} | query)}"


def placed(corpus, doc_id):
    """Return where a document begins in its corpus, its length, and spans of its tokens."""
    number = corpus.find(doc_id)
    return int(corpus.starts[number]), int(corpus.lengths[number]), corpus.spans(number).tolist()


def test_a_document_is_that_of_the_corpus_with_its_token(stored, monkeypatch):
    start, length, spans = placed(stored.lm.lens.corpus, EVIL_ID)
    for offset in (0, 57, 400):
        data = stored.json("GET", path_of(EVIL_ID, at=start + offset))
        left, right = spans[offset]
        parts = EVIL[:left], EVIL[left:right], EVIL[right:]
        assert data["parts"] == [marks_shown(part) for part in parts]
    evil = {"doc_id": EVIL_ID, "title": "<i>‹U+202E›evil", "url": "javascript:alert(1)"}
    assert data.items() >= (evil | {"tokens": length, "characters": len(EVIL)}).items()
    assert stored.json("GET", path_of("plain"))["parts"] == [PLAIN]
    for words, query in (
        ("no document with the id", {"doc_id": "/etc/passwd"}),
        ("its tokens are", {"doc_id": "plain", "at": 10**9}),
    ):
        assert words in stored.refused("GET", path_of(**query))
    # A long one is shown around the place.
    monkeypatch.setattr(lens, "MAX_CHARACTERS", 60_000)
    start, length, spans = placed(stored.lm.lens.corpus, LONG_ID)
    for offset in (0, length // 2, length - 2):
        data = stored.json("GET", path_of(LONG_ID, at=start + offset))
        first, last = data["first"], data["last"]
        left, right = spans[offset]
        assert first <= left < right <= last <= len(LONG)
        assert 60_000 <= last - first < 60_010
        assert "".join(data["parts"]) == marks_shown(LONG[first:last])
    assert data["url"] == "https://example.org/a"


def test_a_lens_whose_corpus_is_gone_says_what_to_do(stored):
    corpus = stored.lm.lens.corpus.path
    hidden = corpus.rename(corpus.with_name("moved"))
    try:
        with Served(prismlm.load(stored.lm.path)) as server:
            error = server.refused("GET", path_of("plain"))
            model = server.json("GET", "/api/model")
            against = server.shown(server.answer(EVIL[:60], 2)["id"], "/steps/3/against")
    finally:
        hidden.rename(corpus)
    assert "prismlm index" in error
    assert "or has changed, and documents are shown from it" in error
    assert (model["prompts"], model["texts"]) == (PROMPTS, {})
    # What speaks against a prediction is read in the lens's own tokens.
    assert (model["lens"]["corpus"], model["lens"]["readable"]) == (False, True)
    assert against["against"]


def test_in_a_browser_text_is_inert_and_the_place_in_view(browser, stored):
    start, length, spans = placed(stored.lm.lens.corpus, EVIL_ID)
    with visited(browser, stored) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        # One place near the end, then another of the same document.
        for offset in (length - 30, 3):
            at = start + offset
            go(page, f"document/{quote(EVIL_ID, safe='')}?at={at}")
            # Not the place that was shown before.
            place = page.locator(f'#place[title="position {at:,} of the corpus"]')
            box = place.bounding_box()
            assert 0 <= box["y"] < box["y"] + box["height"] <= 844
            left, right = spans[offset]
            assert place.text_content() == EVIL[left:right].strip()
        assert_accessible(page)
        assert page.text_content(".x-doc-text") == marks_shown(EVIL)
        assert page.locator(".x-document :is(script, img, i)").count() == 0
        assert page.locator(".x-document .p-head a").count() == 0
        assert "hurt" not in page.title()
        assert_fits_a_phone(page)
        assert EVIL_ID in page.inner_text(".x-command")
