"""The page as people have it: phones, keyboards and screen readers."""

import pytest

from tests.explorer.conftest import TEXT, ask, assert_fits_a_phone, go, visited
from tests.helpers.axe import problems
from tests.helpers.running import assert_never_at_fault


def test_an_answer_is_accessible_and_fits_a_phone(page):
    assert_accessible(page)
    assert page.locator(".x-try").count() > 0
    assert_fits_a_phone(page)
    ask(page)
    assert_accessible(page)
    assert_fits_a_phone(page)
    last = page.locator(".x-nav a").last.bounding_box()
    assert last["x"] + last["width"] <= 390


def assert_accessible(page):
    # The other rules look at no colour.
    for scheme, rules in (("dark", ["color-contrast"]), ("light", [])):
        page.emulate_media(color_scheme=scheme)
        assert problems(page, *rules) == []


def test_views_are_accessible(browser, named):
    with visited(browser, named) as page:
        for view in ("prototypes", "map", "steer", "audit"):
            go(page, view)
            page.wait_for_selector(".x-lead" if view == "steer" else f".x-{view} .prismlm")
            page.wait_for_timeout(300)
            assert_accessible(page)


def test_the_page_names_commands_for_what_a_model_lacks(page, tiny_model):
    missing = page.inner_text(".x-missing")
    for command in ("label", "map"):
        assert f"prismlm {command} {tiny_model}" in missing
    go(page, "prototypes")
    page.wait_for_selector(".x-card[data-chosen] h2")


@pytest.mark.usefixtures("slow_model")
@pytest.mark.parametrize(
    ("view", "begun", "done", "tokens"),
    [
        ("ask", ".p-answer:has-text(' ')", ".x-exports", ".x-column"),
        ("steer", ".p-note:has-text(' of ')", ".x-steered", ".x-table tbody tr"),
    ],
)
def test_a_long_generation_is_stopped_by_its_button(page, view, begun, done, tokens):
    go(page, f"{view}?prototype=7&strength=-50")
    shown = page.locator(f".x-{view}")
    shown.get_by_label("Prompt").fill(TEXT)
    shown.get_by_label("tokens").fill("250")
    shown.locator(".x-go").click()
    page.wait_for_selector(f".x-{view} .x-out {begun}")
    shown.locator(".x-stop").click()
    page.wait_for_selector(f".x-{view} {done}")
    assert 0 < shown.locator(tokens).count() < 250


def test_whole_characters_and_inert_text(page):
    ask(page, "<script>window.hit=1</script> 東京 \u202eabc 👩\u200d🚀", 2)
    text = page.inner_text(".x-answer .p-text")
    for part in ("<script>", "東″″京″″", "‹U+202E›"):
        assert part in text
    assert "\u202e" not in text
    assert "\ufffd" not in text.split("🚀")[0]
    assert page.evaluate("window.hit") is None


def test_no_request_is_the_servers_fault(named):
    routes = assert_never_at_fault(named)
    assert len(routes) > 15
    assert all(route.definition.raw["summary"] for route in routes)
