"""Who gets an answer and who does not, over real HTTP."""

from http.cookies import SimpleCookie

import pytest

from tests.explorer.conftest import TOKEN

STEER, OPENING = "/api/steer", f"/?token={TOKEN}"


def ask(served, path, method="GET", **headers):
    """Ask without the key."""
    served.headers, own = {}, served.headers
    try:
        return served.ask(method, path, headers=headers)
    finally:
        served.headers = own


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_the_key_in_the_address_becomes_a_cookie_that_other_sites_cannot_use(served):
    status, headers, _ = ask(served, OPENING)
    assert (status, headers["location"]) == (303, "/")
    (cookie,) = SimpleCookie(headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    assert cookie.key == f"prismlm-{served.port}"
    # A session: what reads the cookie has no key to give away.
    assert TOKEN not in cookie.value
    assert ask(served, "/", **bearer(cookie.value))[0] == 401
    status, headers, body = ask(served, "/", Cookie=f"{cookie.key}={cookie.value}")
    assert status == 200
    assert TOKEN.encode() not in body
    assert "script-src 'self';" in headers["content-security-policy"]


def test_cookies_of_other_programs_and_explorers_neither_lock_out_nor_open(served, named):
    own, foreign = (ask(s, OPENING)[1]["set-cookie"].partition(";")[0] for s in (served, named))
    other = 'a={"b": [1, "c"]}'
    assert ask(served, "/api/model", Cookie=f"{other}; {own}")[0] == 200
    foreign = f"prismlm-{served.port}={foreign.partition('=')[2]}"
    for cookies in (other, foreign):
        assert ask(served, "/api/model", Cookie=cookies)[0] == 401


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
    status, sent, body = ask(served, path, method, **headers)
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
        assert words in served.refused("POST", STEER, body)
