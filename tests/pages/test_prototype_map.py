"""The page of all prototypes, used in a real browser."""

import pytest

from prismlm.direction_marks import marks_shown
from prismlm.pages.frame import colour
from prismlm.pages.prototype_map import prototype_map_page
from tests.helpers.lens_files import CATEGORIES, named_model
from tests.helpers.running import assert_fits_a_phone

HOSTILE = '</script><script>document.title="run"</script> \u202egnp'


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
        colours = "all => all.map((one) => one.style.getPropertyValue('--k'))"
        dots = tab.locator(".x-chip i").evaluate_all(colours)
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
        assert_fits_a_phone(tab)


def test_an_address_names_a_prototype_and_names_are_text(opened, lens):
    with opened(prototype_map_page(lens), "#/map?prototype=0") as tab:
        # A name cannot turn the page's direction.
        assert tab.locator(".x-side h2").inner_text() == marks_shown(HOSTILE)
        assert tab.title() == "Prototypes"
        token = tab.locator(".x-raised bdi").first
        assert token.evaluate("it => getComputedStyle(it).whiteSpace") == "pre"
