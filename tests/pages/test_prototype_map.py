"""The page of all prototypes, used in a real browser."""

import shutil

import pytest

from prismlm.direction_marks import marks_shown
from prismlm.lens.labels.map import worth_seeing
from prismlm.pages.colours import colour
from prismlm.pages.frame import write_page
from prismlm.pages.prototype_map import prototype_map_page
from tests.helpers.named_lens import CATEGORIES, named_model

HOSTILE = '</script><script>document.title="run"</script> \u202egnp'


@pytest.fixture(scope="module")
def page(tiny_model, tmp_path_factory):
    """A page of a lens with hand-made places, categories and one hostile name."""
    lens = named_model(tiny_model, tmp_path_factory.mktemp("map") / "model", first=HOSTILE).lens
    path = tmp_path_factory.mktemp("page") / "map.html"
    write_page(prototype_map_page(lens), path)
    return path, lens


def test_a_person_looks_around(page):
    from playwright import sync_api as playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "this test needs chromium"
    path, lens = page
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        assert tab.url.endswith(f"#{worth_seeing(lens)}")
        tab.goto(f"{path.as_uri()}#0")
        tab.reload()
        # Dots in the legend have the colours that categories have everywhere.
        dots = tab.locator(".m-key i").evaluate_all("all => all.map((i) => i.style.background)")
        rgb = [tuple(bytes.fromhex(colour(name)[1:])) for name in CATEGORIES]
        assert sorted(dots) == sorted(f"rgb{values}" for values in rgb)
        # A name is text, and cannot turn the page's direction.
        assert tab.locator(".m-card h2").inner_text() == marks_shown(HOSTILE)
        assert tab.title() == "Prototypes"
        assert tab.locator(".m-card h2 bdi").count() == 1
        assert tab.locator(".m-count").inner_text() == f"{lens.listed.sum()} of 192"
        tab.get_by_role("button", name="also those of fewer than ten places").click()
        assert tab.locator(".m-count").inner_text() == "192 of 192"
        # One category put away leaves half of the prototypes.
        tab.get_by_role("button", name="Morphology").click()
        assert tab.locator(".m-count").inner_text() == "96 of 192"
        tab.get_by_role("button", name="Morphology").click()
        tab.get_by_label("Search names").fill("word117")
        assert tab.locator(".m-count").inner_text() == "1 of 192"
        tab.locator(".m-results button").click()
        assert tab.locator(".m-card h2").inner_text() == "word117 → next117"
        assert tab.url.endswith("#117")
        tab.get_by_label("Search names").fill("")
        token = lens.prototypes["top_tokens"][117].as_py()[0].strip()
        assert token in tab.locator(".m-tokens").inner_text()
        token = tab.locator(".m-tokens bdi").first
        assert token.evaluate("it => getComputedStyle(it).whiteSpace") == "pre-wrap"
        # The next one to the right on the grid of sixteen.
        tab.locator(".m-canvas").focus()
        tab.keyboard.press("ArrowRight")
        assert tab.locator(".m-card h2").inner_text() == "word118 → next118"
        box = tab.locator(".m-canvas").bounding_box()
        tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tab.set_viewport_size({"width": 390, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        browser.close()
    assert not problems
    assert all(url.startswith("file:") for url in requests)


def test_every_prototype_is_on_the_page(page):
    path, lens = page
    html = path.read_text(encoding="utf-8")
    assert html.count("</script>") == 2
    assert all(f"word{i} → next{i}" in html for i in range(1, lens.num_prototypes))
