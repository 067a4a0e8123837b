"""Prototypes as a list, as cards and on a map, over real HTTP and in a real browser."""

import re
import shutil
from dataclasses import replace

import pytest

import prismlm
from prismlm.direction_marks import marks_shown
from prismlm.lens import layout
from tests.explorer.conftest import HOSTILE, Served, assert_fits_a_phone, go
from tests.helpers.named_lens import ACROSS, CATEGORIES, name_by_hand


@pytest.fixture(scope="module")
def served(named):
    return named


def test_names_that_are_written_meanwhile_are_seen_when_the_page_is_opened(tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    with Served(prismlm.load(directory)) as server:
        assert server.json("GET", "/api/model")["lens"]["map"] is False
        assert f"prismlm map {directory}" in server.refused("GET", "/api/map")
        assert server.json("GET", "/api/prototypes?query=word117&all=1")["total"] == 0
        name_by_hand(prismlm.load(directory))
        assert server.json("GET", "/api/model")["lens"]["map"] is True
        assert "word117 → next117" in server.json("GET", "/api/map")["names"]
        assert server.json("GET", "/api/prototypes?query=word117&all=1")["items"][0]["id"] == 117
        lens = prismlm.load(directory).lens
        layout.write_meta(lens.path, replace(lens.meta, tokens=1, map=None))
        error = server.refused("GET", "/api/model", expected=409)
        assert "rebuilt or removed" in error


def test_a_search_finds_tokens_and_contexts(served, lm):
    context = next(one for one in lm.lens.index.to_pylist() if one["after"])
    words = sorted(context["after"].split(), key=len)[-2:]
    data = served.json("GET", f"/api/prototypes?query={'+'.join(words)}&limit=500&all=1")
    assert context["prototype"] in [one["id"] for one in data["items"]]
    assert served.json("GET", "/api/prototypes?query=nosuchwordanywhere")["total"] == 0


def test_filters_orders_and_the_place_of_one(served, lm):
    count = lm.lens.num_prototypes
    both = served.json("GET", "/api/prototypes?sort=id&at=117&limit=1&all=1")
    assert (both["total"], both["place"]) == (count, 117)
    assert both["categories"] == dict.fromkeys(CATEGORIES, count // 2)
    path = "/api/prototypes?category=Morphology&all=1"
    odd = served.json("GET", f"{path}&sort=id&at=117&first=58&limit=1")
    assert (odd["total"], odd["matching"], odd["place"]) == (count // 2, count, 58)
    assert odd["items"][0]["id"] == 117
    assert served.json("GET", f"{path}&at=0")["place"] is None
    items = served.json("GET", "/api/prototypes?limit=500&sort=usage&all=1")["items"]
    usages = [one["usage"] for one in items]
    assert usages == sorted(usages, reverse=True)
    # Those of few places are not listed unless they are asked for.
    few = [one["id"] for one in items if one["positions"] < 10]
    usual = served.json("GET", f"/api/prototypes?limit=500&sort=usage&at={few[0]}")
    assert usual["items"] == [one for one in items if one["positions"] >= 10]
    assert (usual["total"], usual["place"]) == (count - len(few), None)


def test_a_person_pages_and_shares_what_is_seen(page, lm):
    card = page.locator(".x-card[data-chosen]")
    go(page, "prototypes/0")
    card.locator("h2").wait_for()
    assert card.locator("h2").inner_text() == marks_shown(HOSTILE)
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
    assert card.locator("h2").inner_text() == f"word{odd[1]} → next{odd[1]}"
    page.keyboard.press("End")
    page.wait_for_url(re.compile(rf"#/prototypes/{odd[-1]}\?"))
    # What was shared opens at the same card, of the same list.
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    card.locator("h2").wait_for()
    assert card.locator("h2").inner_text() == f"word{odd[-1]} → next{odd[-1]}"
    assert_fits_a_phone(page)


# -- the map


def spot(page, number, count):
    """Return where a prototype of the grid is on the screen while all of it is shown."""
    box = page.locator(".x-over").bounding_box()
    down = count // ACROSS - 1
    scale = 0.94 * min(box["width"] / (ACROSS - 1), box["height"] / down)
    x = box["x"] + box["width"] / 2 + (number % ACROSS - (ACROSS - 1) / 2) * scale
    return x, box["y"] + box["height"] / 2 + (number // ACROSS - down / 2) * scale


def opened(page, query=""):
    page.evaluate(f"location.hash = '#/map{query}'")
    page.locator(".x-over").wait_for()
    few = page.get_by_role("button", name="Few places")
    if few.get_attribute("aria-pressed") == "false":
        few.click()


def lassoed(page, corners):
    page.keyboard.down("Shift")
    page.mouse.move(*corners[0])
    page.mouse.down()
    for corner in corners[1:]:
        page.mouse.move(*corner, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")


def test_places_are_those_of_the_lens(served, lm):
    data = served.json("GET", "/api/map")
    table = lm.lens.prototypes
    for name in ("x", "y"):
        assert data[name] == pytest.approx(table[name].to_pylist(), abs=1e-3)
    assert data["leading"] == lm.lens.by_size.tolist()
    assert data["listed"] == (lm.lens.cell_sizes >= 10).tolist()
    assert data["names"] == [marks_shown(name) for name in lm.lens.names]
    named = [data["categories"][number]["name"] for number in data["category"]]
    assert named == lm.lens.categories


def test_a_lasso_shows_what_an_area_has(page, lm):
    count = lm.lens.num_prototypes
    opened(page)
    # Around 17, 18, 19 and those below them, by half a step.
    (left, top), (right, below) = spot(page, 17, count), spot(page, 19 + ACROSS, count)
    half = (right - left) / 4
    corners = [
        (left - half, top - half),
        (right + half, top - half),
        (right + half, below + half),
        (left - half, below + half),
    ]
    lassoed(page, corners)
    side = page.locator(".x-side")
    inside = [17, 18, 19, 17 + ACROSS, 18 + ACROSS, 19 + ACROSS]
    assert side.locator("h2").inner_text() == "6 prototypes"
    names = [row.inner_text() for row in side.locator(".x-found").all()]
    assert sorted(names) == sorted(f"word{i} → next{i}" for i in inside)
    bar = side.locator(".p-bars li", has_text=CATEGORIES[1])
    odd = sum(i % 2 for i in inside)
    assert bar.locator(".p-number").inner_text() == f"{100 * odd / 6:.0f} %"
    assert bar.get_attribute("title") == f"Morphology: {odd} of 6; of all prototypes 96 of 192"
    side.locator(".x-found").first.click()
    side.locator(".x-kind").wait_for()
