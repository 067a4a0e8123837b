"""The pictures of the explorer in the docs, taken of the demo's model in a real browser.

    pytest -m slow tests/docs/test_explorer_images.py --images

Without ``--images`` the views are opened and looked at all the same, and no picture is replaced.
"""

import contextlib
import json
from pathlib import Path

import pytest

from tests.helpers.running import Running, chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUESTION = "What is the first sign of sudden cardiac arrest?"
PROMPT = "The symptoms of this disease in patients include"
TEXTS = (
    "Leishmaniasis is a parasitic disease that is found in parts of the tropics and subtropics.",
    "The Tribunal dismissed the application, and the applicant appealed to the Federal Court.",
    "Once upon a time there was a little girl who lived in a small house near the forest.",
    "The Federal Reserve raised its target for the federal funds rate by a quarter of a point.",
    "Qwx vlorp tzin gebbet, strank oplim dredge quanfle morbit sesquith.",
)
KEY = "the-key-of-this-run"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the demo's model is explored; skipped where it cannot be fetched."""
    import prismlm
    from prismlm.demo.fetched import Unreachable, run_fetched
    from prismlm.demo.prompts import PROMPTS, QUESTIONS
    from prismlm.explorer import create_app

    # Commands that the pages show have the path that a reader's have.
    with contextlib.chdir(tmp_path_factory.mktemp("demo")):
        try:
            lm = prismlm.load(run_fetched(Path("prismlm-demo")).model)
        except Unreachable as error:
            pytest.skip(str(error))
        shown = {"prompts": PROMPTS, "questions": QUESTIONS}
        with Running(
            lambda host: create_app(lm, token=KEY, hosts=frozenset({host}), **shown)
        ) as it:
            yield f"http://{it.host}/?token={KEY}"


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def begin(page):
    page.wait_for_selector(".x-held")
    assert page.locator(".x-try").count() == 10


def ask(page):
    page.fill(".x-prompt", QUESTION)
    page.press(".x-prompt", "Enter")
    page.wait_for_selector(".x-exports", timeout=120_000)
    page.evaluate("document.activeElement.blur()")
    assert "Sudden Cardiac Arrest" in page.locator(".p-grouped").first.inner_text()
    assert page.locator(".x-column").count() > 25


def tokens(page):
    ask(page)
    page.click(".p-tokens > summary")
    page.locator(".x-column").nth(20).click()
    page.wait_for_selector(".p-aside .p-passage")
    page.evaluate("scrollTo(0, document.querySelector('.p-tokens').offsetTop - 60)")


def phone(page):
    ask(page)
    page.evaluate("document.querySelector('.x-answer').scrollIntoView()")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def prototypes(page):
    page.wait_for_selector(".x-card[data-chosen] mark")
    assert "gene" in page.inner_text(".x-card[data-chosen] h2").lower()


def prototype_map(page):
    page.wait_for_selector(".x-over")
    page.wait_for_timeout(1500)
    assert "prototypes" in page.inner_text(".x-map")


def steer(page):
    page.click(".x-lead")
    page.click(".x-steer button[type=submit]")
    page.wait_for_selector(".x-steer .x-steered", timeout=120_000)
    assert page.locator(".x-steered tbody tr").count() == 20


def inside(page):
    page.fill(".x-inside textarea", PROMPT)
    page.click(".x-inside button[type=submit]")
    page.wait_for_selector(".x-inside canvas", timeout=60_000)
    page.wait_for_timeout(500)
    # A small map for each of the nine heads of a layer, and the one that is looked at.
    assert page.locator(".x-inside canvas").count() == 10


def audit(page):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    texts = {"name": "texts.jsonl", "mimeType": "application/jsonl", "buffer": rows.encode()}
    page.set_input_files(".x-audit input[type=file]", texts)
    page.click(".x-audit button[type=submit]")
    page.wait_for_selector(".x-audit a[download]", timeout=240_000)
    page.wait_for_timeout(300)
    assert page.inner_text(".x-audit .p-figure b") == str(len(TEXTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "view", "act", "size", "scheme"),
    [
        ("begin", "#/ask", begin, (1280, 880), "light"),
        ("ask", "#/ask", ask, (1280, 1180), "light"),
        ("tokens", "#/ask", tokens, (1280, 1180), "light"),
        ("phone", "#/ask", phone, (390, 844), "dark"),
        ("prototypes", "#/prototypes?q=gene", prototypes, (1280, 880), "light"),
        ("map", "#/map", prototype_map, (1280, 880), "dark"),
        ("steer", "#/steer", steer, (1280, 1180), "light"),
        ("inside", "#/inside", inside, (1280, 880), "light"),
        ("audit", "#/audit", audit, (1280, 880), "light"),
    ],
)
def test_a_view(name, view, act, size, scheme, request, address, browser):
    width, height = size
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(address)
    page.wait_for_selector(".x-nav a")
    page.evaluate("view => { location.hash = view }", view)
    act(page)
    if request.config.getoption("--images"):
        page.screenshot(path=IMAGES / f"explorer-{name}.png")
    assert errors == []
    context.close()
