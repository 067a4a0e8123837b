"""The map over real HTTP, and looked around in with a real browser."""

import pytest

import prismlm
from prismlm.direction_marks import marks_shown
from tests.explorer.conftest import Served
from tests.helpers.named_lens import ACROSS, CATEGORIES

PAINTED = """async ([x, y]) => {
  const canvas = document.querySelector(".x-over"), box = canvas.getBoundingClientRect();
  [...document.querySelectorAll("button")].find((one) => one.textContent === "All of it").click();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const context = canvas.getContext("2d");
  const alpha = (...box) => context.getImageData(...box).data.filter((_, i) => i % 4 === 3);
  const all = alpha(0, 0, canvas.width, canvas.height).filter((one) => one > 100).length;
  return [all, alpha(Math.floor(x - box.left), Math.floor(y - box.top), 1, 1)[0]];
}"""


@pytest.fixture(scope="module")
def served(named):
    return named


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


def test_a_lens_without_a_map_says_how_to_make_one(tiny_model):
    with Served(prismlm.load(tiny_model)) as server:
        assert f"prismlm map {tiny_model}" in server.refused("GET", "/api/map")


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
    page.get_by_role("button", name="Few places").click()
    lassoed(page, corners)
    side = page.locator(".x-side")
    inside = [17, 18, 19, 17 + ACROSS, 18 + ACROSS, 19 + ACROSS]
    assert side.locator(".x-found").count() == int(lm.lens.listed[inside].sum())
    page.get_by_role("button", name="Few places").click()
    lassoed(page, corners)
    assert side.locator("h2").inner_text() == "6 prototypes"
    names = [row.inner_text() for row in side.locator(".x-found").all()]
    assert sorted(names) == sorted(f"word{i} → next{i}" for i in inside)
    bar = side.locator(".p-bars li", has_text=CATEGORIES[1])
    odd = sum(i % 2 for i in inside)
    assert bar.locator(".p-number").inner_text() == f"{100 * odd / 6:.0f} %"
    assert bar.get_attribute("title") == f"Morphology: {odd} of 6; of all prototypes 96 of 192"
    page.locator(".x-chip", has_text="Numbers").click()
    assert side.locator("h2").inner_text() == f"{6 - odd} prototypes"
    assert "category=Numbers" in page.url
    side.locator(".x-found").first.click()
    side.locator(".x-kind").wait_for()


def test_points_are_drawn(page, lm):
    opened(page)
    painted, there = page.evaluate(PAINTED, list(spot(page, 37, lm.lens.num_prototypes)))
    # 192 discs of a radius of 1.6 pixels, eight pixels each, and names of regions.
    assert 1_000 < painted < 5_000
    assert there > 100
