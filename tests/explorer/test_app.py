"""The page as people have it: phones, keyboards, screen readers, and a server that goes away."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

import prismlm
from tests.explorer.conftest import TOKEN, Served, unfold, unhurried, visited
from tests.helpers.axe import problems

CASES = 8  # of each route
TEXT = "The patient was given a dose of the drug"


def test_an_answer_has_nothing_that_axe_objects_to(page):
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert problems(page) == []
    page.fill(".x-prompt", TEXT)
    page.fill("label:has-text('tokens') input", "3")
    page.click(".x-go")
    unfold(page)
    assert problems(page) == []
    page.emulate_media(color_scheme="light")
    assert problems(page) == []


@pytest.mark.parametrize("view", ["prototypes", "map", "steer", "audit"])
def test_views_have_nothing_that_axe_objects_to(browser, named, view):
    with visited(browser, named) as page:
        page.evaluate("view => { location.hash = `#/${view}` }", view)
        page.wait_for_selector(f".x-{view} .prismlm")
        if view == "steer":
            page.wait_for_selector(".x-lead")
        page.wait_for_timeout(300)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert problems(page) == []


def test_what_a_model_lacks_is_told_with_the_command_that_makes_it(page, tiny_model):
    told = page.inner_text(".x-missing")
    for command in ("label", "map"):
        assert f"prismlm {command} {tiny_model}" in told
    page.evaluate("location.hash = '#/prototypes'")
    page.wait_for_selector(".x-card[data-chosen] h2")


def test_a_phone_scrolls_in_one_direction(browser, served):
    with visited(browser, served, viewport={"width": 390, "height": 844}) as page:
        last = page.locator(".x-nav a").last.bounding_box()
        assert last["x"] + last["width"] <= 390
        assert page.locator(".x-try").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.fill(".x-prompt", TEXT)
        page.fill("label:has-text('tokens') input", "8")
        page.click(".x-go")
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.usefixtures("taking_its_time")
@pytest.mark.parametrize("view", ["ask", "steer"])
def test_a_long_generation_is_stopped_by_its_button(browser, served, view):
    with visited(browser, served) as page:
        page.evaluate(f"location.hash = '#/{view}?prototype=7&strength=-50'")
        shown = page.locator(f".x-{view}")
        shown.get_by_label("Prompt").fill(TEXT)
        shown.get_by_label("tokens").fill("400" if view == "ask" else "250")
        shown.locator(".x-go").click()
        # As soon as something is written.
        page.evaluate(
            """view => new Promise((done) => {
              const written = { ask: ".p-answer", steer: ".p-note" }[view];
              const look = () => {
                const node = document.querySelector(`.x-${view} .x-out ${written}`);
                if (!node?.textContent || (view === "steer" && !/ of /.test(node.textContent)))
                  return void requestAnimationFrame(look);
                document.querySelector(`.x-${view} .x-stop`).click();
                done();
              };
              look();
            })""",
            view,
        )
        page.wait_for_selector(f".x-{view} .x-exports" if view == "ask" else ".x-steered")
        shown.locator(".x-stop").wait_for(state="hidden")
        written = shown.locator(".x-column" if view == "ask" else ".x-table tbody tr").count()
        assert 0 < written < (400 if view == "ask" else 250)


def test_a_server_that_goes_away_in_the_middle_is_told(browser, tiny_model):
    context = browser.new_context()
    page = context.new_page()
    lm = prismlm.load(tiny_model)
    with unhurried(lm), Served(lm) as server:
        page.goto(server.address)
        page.fill(".x-prompt", TEXT)
        page.fill("label:has-text('tokens') input", "480")
        page.click(".x-go")
        page.wait_for_selector(".x-note:text-is('Writing…')")
        server.server.force_exit = True
    page.wait_for_selector(".x-problem")
    assert "server" in page.inner_text(".x-problem")
    assert page.inner_text(".x-note") == "Broken off"
    # The scripts of a view that was not looked at before cannot be had any more.
    page.evaluate("location.hash = '#/map'")
    page.wait_for_selector(".x-map .x-problem >> text=server cannot be reached")
    context.close()


def test_whole_characters_and_inert_text(page):
    hostile = "<script>window.hit=1</script> 東京 \u202eabc 👩\u200d🚀"
    page.fill(".x-prompt", hostile)
    page.fill("label:has-text('tokens') input", "2")
    page.click(".x-go")
    unfold(page)
    text = page.inner_text(".x-answer .p-text")
    assert "<script>" in text
    assert "東″″京″″" in text
    assert "‹U+202E›" in text
    assert "\u202e" not in text
    assert "\ufffd" not in text.split("🚀")[0]
    assert page.evaluate("window.hit") is None


def test_no_request_is_the_servers_fault(named):
    """Whatever the API's own document allows, and what it does not."""
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    document = schemathesis.openapi.from_url(f"http://{named.host}/openapi.json", headers=allowed)
    routes = [found.ok() for found in document.get_all_operations()]
    assert len(routes) > 15
    said = set()
    for route in routes:
        assert route.definition.raw["summary"], route.label

        @settings(
            max_examples=CASES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(case=route.as_strategy())
        def check(case):
            response = case.call(headers=allowed)
            said.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]

        check()
    assert {200, 400} <= said
