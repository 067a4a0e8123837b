"""Who gets an answer, and the page as people have it: phones, keyboards and screen readers."""

import hashlib
import json
from http.cookies import SimpleCookie
from pathlib import Path
from unittest.mock import patch

import pytest

from prismlm.pages.frame import ASSETS
from tests.explorer.conftest import TEXT, TOKEN, ask, go
from tests.helpers.running import assert_accessible, assert_fits_a_phone, assert_never_at_fault

OPENING = f"/?token={TOKEN}"
VENDOR, PROJECT = ASSETS / "vendor", Path(__file__).parents[2]
LIBRARIES = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))["libraries"]
NAMED = {one["file"]: one["sha256"] for library in LIBRARIES for one in library["files"]}


def test_an_answer_is_accessible_fits_a_phone_and_has_whole_characters_and_inert_text(
    page, tiny_model
):
    missing = page.inner_text(".x-missing")
    assert all(f"prismlm {command} {tiny_model}" in missing for command in ("label", "map"))
    assert_accessible(page)
    assert page.locator(".x-try").count() > 0
    assert_fits_a_phone(page)
    ask(page, "<script>window.hit=1</script> 東京 \u202eabc 👩\u200d🚀", 2)
    assert_accessible(page)
    text = page.inner_text(".x-answer .p-text")
    assert all(part in text for part in ("<script>", "東″″京″″", "‹U+202E›"))
    assert "\u202e" not in text
    assert "\ufffd" not in text.split("🚀")[0]
    assert page.evaluate("window.hit") is None
    assert_fits_a_phone(page)
    last = page.locator(".x-nav a").last.bounding_box()
    assert last["x"] + last["width"] <= 390
    # Prototypes without names.
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


def test_no_request_is_the_servers_fault(named):
    routes = assert_never_at_fault(named)
    assert len(routes) > 15
    assert all(route.definition.raw["summary"] for route in routes)


# -- the key


def keyless(served, path, method="GET", **headers):
    """Ask without the key."""
    with patch.object(served, "headers", {}):
        return served.ask(method, path, headers=headers)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_the_key_in_the_address_becomes_a_cookie_that_other_sites_cannot_use(served):
    status, headers, _ = keyless(served, OPENING)
    assert (status, headers["location"]) == (303, "/")
    (cookie,) = SimpleCookie(headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    assert cookie.key == f"prismlm-{served.port}"
    # A session: what reads the cookie has no key to give away.
    assert TOKEN not in cookie.value
    assert keyless(served, "/", **bearer(cookie.value))[0] == 401
    status, headers, body = keyless(served, "/", Cookie=f"{cookie.key}={cookie.value}")
    assert status == 200
    assert TOKEN.encode() not in body
    assert "script-src 'self';" in headers["content-security-policy"]


def test_cookies_of_other_programs_and_explorers_neither_lock_out_nor_open(served, named):
    own, foreign = (keyless(s, OPENING)[1]["set-cookie"].partition(";")[0] for s in (served, named))
    other = 'a={"b": [1, "c"]}'
    foreign = f"prismlm-{served.port}={foreign.partition('=')[2]}"
    for cookies, status in ((f"{other}; {own}", 200), (other, 401), (foreign, 401)):
        assert keyless(served, "/api/model", Cookie=cookies)[0] == status


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("GET", "/", {}, 401),
        ("GET", "/?token=%E6%97%A5", {}, 401),
        ("GET", "/static/explorer.js", {}, 401),
        ("POST", "/api/v1/completions", bearer("another"), 401),
        # Another name for this address: what a page that rebinds its own name would send.
        ("GET", "/api/model", {"Host": "evil.example:80"} | bearer(TOKEN), 421),
        ("GET", "/api/model", {"Origin": "http://evil.example"} | bearer(TOKEN), 403),
        ("GET", "/static/%2e%2e/app.py", bearer(TOKEN), 404),
    ],
)
def test_what_is_refused(served, method, path, headers, expected):
    status, sent, body = keyless(served, path, method, **headers)
    assert status == expected, body
    assert sent["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in sent


def test_a_bad_request_is_named(served):
    for words, body in (
        ("generate", {"text": "a", "generate": -1}),
        ("reads 512", {"text": "word " * 600, "prototype": 1}),
        ("JSON", b"{"),
        ("unicode", b'{"text": "\\ud800"}'),
        ("temperature", b'{"text": "a", "temperature": NaN}'),
    ):
        assert words in served.refused("POST", "/api/steer", body)


def test_every_vendored_file_is_as_it_was_published_and_has_a_licence_in_the_wheel():
    paths = [path for path in VENDOR.rglob("*") if path.is_file()]
    assert {path.relative_to(VENDOR).as_posix() for path in paths} == {*NAMED, "manifest.json"}
    for name, digest in NAMED.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    for library in LIBRARIES:
        path = (VENDOR / library["licence_text"]).relative_to(PROJECT).as_posix()
        assert f'"{path}"' in project
