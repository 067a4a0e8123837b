"""The page of all prototypes, used in a real browser."""

import pytest

from prismlm.direction_marks import marks_shown
from prismlm.pages.frame import colour, html_page
from prismlm.pages.prototype_map import prototype_map_page
from tests.helpers.named_lens import CATEGORIES, named_model

HOSTILE = '</script><script>document.title="run"</script> \u202egnp'

MANY, ACROSS = 4_000, 80
# Counts the discs of a page from when it is loaded; a ring around a point is one more.
COUNT_DISCS = """
  const own = CanvasRenderingContext2D.prototype.arc;
  window.discs = 0;
  CanvasRenderingContext2D.prototype.arc = function (...all) { discs++; own.apply(this, all); };
"""
NEXT_FRAME = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => { done(discs); discs = 0; })))"""


@pytest.fixture(scope="module")
def lens(tiny_model, tmp_path_factory):
    """A lens with hand-made places, categories and one hostile name."""
    return named_model(tiny_model, tmp_path_factory.mktemp("map") / "model", first=HOSTILE).lens


def test_a_person_looks_around(opened, lens):
    html = prototype_map_page(lens)
    assert html.count("</script>") == 2
    with opened(html) as tab:
        side = tab.locator(".x-side")
        assert side.locator("h2").inner_text() == "192 prototypes"
        dots = tab.locator(".x-chip i").evaluate_all(
            "all => all.map((one) => one.style.getPropertyValue('--k').trim())"
        )
        assert sorted(dots) == sorted(colour(name) for name in CATEGORIES)
        tab.get_by_role("button", name="Few places").click()
        tab.locator(".x-chip", has_text="Morphology").click()
        assert tab.get_by_role("status").inner_text() == "96 of 192"
        tab.locator(".x-chip", has_text="Morphology").click()
        # Names, tokens and texts are searched.
        tab.get_by_label("Search prototypes").fill("word117")
        side.locator(".x-found").click()
        side.locator("h2", has_text="word117 → next117").wait_for()
        assert "prototype=117" in tab.url
        token = lens.prototypes["top_tokens"][117].as_py()[0].strip()
        assert token in side.locator(".x-raised").inner_text()
        assert side.locator(".x-places li").count() == 3
        assert side.locator(".x-button").count() == 0
        tab.get_by_label("Search prototypes").fill("")
        tab.locator(".x-over").press("ArrowRight")
        side.locator("h2", has_text="word118 → next118").wait_for()
        tab.set_viewport_size({"width": 390, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_an_address_names_a_prototype_and_names_are_text(opened, lens):
    with opened(prototype_map_page(lens), "#/map?prototype=0") as tab:
        # A name cannot turn the page's direction.
        assert tab.locator(".x-side h2").inner_text() == marks_shown(HOSTILE)
        assert tab.title() == "Prototypes"
        token = tab.locator(".x-raised bdi").first
        assert token.evaluate("it => getComputedStyle(it).whiteSpace") == "pre"


@pytest.fixture(scope="module")
def large():
    """A page of thousands of prototypes, on a grid."""
    names = [f"p{number}" for number in range(MANY)]
    places = {
        "x": [number % ACROSS for number in range(MANY)],
        "y": [number // ACROSS for number in range(MANY)],
        "category": [number % 2 for number in range(MANY)],
        "names": names,
        "leading": list(range(MANY)),
        "listed": [True] * MANY,
        "categories": [
            {"name": name, "colour": colour(name), "prototypes": MANY // 2} for name in CATEGORIES
        ],
        "regions": [],
    }
    cards = [
        {"id": number, "name": name, "description": None, "tokens": [], "contexts": []}
        for number, name in enumerate(names)
    ]
    return html_page("Prototypes", "map_page.js", {"map": places, "cards": cards})


def test_hover_and_lasso_do_not_repaint_the_points(opened, large):
    with opened(large) as tab:
        tab.add_init_script(COUNT_DISCS)
        tab.reload()
        tab.get_by_role("button", name="All of it").click()
        assert tab.evaluate(NEXT_FRAME) >= MANY
        box = tab.locator(".x-over").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        before = tab.locator(".x-plot").screenshot()
        tab.mouse.move(x, y)
        assert 1 <= tab.evaluate(NEXT_FRAME) < 10
        assert tab.locator(".x-plot").screenshot() != before
        tab.keyboard.down("Shift")
        tab.mouse.down()
        for corner in ((x + 80, y), (x + 80, y + 80), (x, y + 80)):
            tab.mouse.move(*corner, steps=4)
        tab.mouse.up()
        tab.keyboard.up("Shift")
        tab.locator(".x-side h2", has_not_text=f"{MANY:,}").wait_for()
        assert tab.evaluate(NEXT_FRAME) < 100
        # The view, the filter and the size change what is painted.
        tab.locator(".x-over").press("+")
        assert tab.evaluate(NEXT_FRAME) >= 100
        tab.locator(".x-chip").first.click()
        assert tab.evaluate(NEXT_FRAME) >= 100
        tab.set_viewport_size({"width": 1000, "height": 800})
        # The observer of the size runs in the next frame and paints in the one after it.
        tab.wait_for_function("() => discs >= 100")
