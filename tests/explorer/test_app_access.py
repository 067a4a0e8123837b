"""Who gets an answer and who does not, over real HTTP."""

from http.cookies import SimpleCookie

import pytest
from tokenizers import pre_tokenizers

from prismlm.errors import DecompositionError
from tests.explorer.conftest import TOKEN, texts_of

TEXT = "The patient was given a dose"
BODY = {"text": TEXT, "generate": 1, "prototype": 1}
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


@pytest.mark.parametrize("other", ['a={"b": [1, "c"]}', "ü=ü", "prismlm-1=x"])
def test_cookies_of_other_programs_and_explorers_neither_lock_out_nor_open(served, named, other):
    own, foreign = (ask(s, OPENING)[1]["set-cookie"].partition(";")[0] for s in (served, named))
    for cookies in (f"{other}; {own}", f"{own}; {other}", f"{other};{own};{other}"):
        assert ask(served, "/api/model", Cookie=cookies.encode())[0] == 200
    foreign = f"prismlm-{served.port}={foreign.partition('=')[2]}"
    for cookies in (other, foreign):
        assert ask(served, "/api/model", Cookie=cookies.encode())[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("GET", "/", {}, 401),
        ("GET", "/?token=another", {}, 401),
        ("GET", "/?token=%E6%97%A5", {}, 401),
        ("GET", "/api/model", {"Cookie": "prismlm-1=another"}, 401),
        ("GET", "/static/explorer.js", {}, 401),
        ("GET", "/api/model", bearer("another"), 401),
        ("POST", "/api/v1/completions", bearer("another"), 401),
        # Another name for this address: what a page that rebinds its own name would send.
        ("GET", "/api/model", {"Host": "evil.example:80"} | bearer(TOKEN), 421),
        ("GET", "/api/model", {"Origin": "http://evil.example"} | bearer(TOKEN), 403),
        ("GET", "/static/../app.py", bearer(TOKEN), 404),
        ("GET", "/static/%2e%2e/app.py", bearer(TOKEN), 404),
        ("GET", "/static//etc/passwd", bearer(TOKEN), 404),
    ],
)
def test_what_is_refused(served, method, path, headers, expected):
    status, sent, body = ask(served, path, method, **headers)
    assert status == expected, body
    assert sent["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in sent


def test_a_bad_request_is_named(served):
    for words, body in (
        ("text", {"text": ""}),
        ("generate", {"text": "a", "generate": -1}),
        ("generate", {"text": "a", "generate": 10**9}),
        ("temperature", {"text": "a", "temperature": 1e308}),
        ("characters", {"text": "word " * 100_000, "prototype": 1}),
        ("text", {}),
        ("JSON", b"{"),
        ("unicode", b'{"text": "\\ud800"}'),
        ("temperature", b'{"text": "a", "temperature": NaN}'),
        ("seed", b'{"text": "a", "seed": %s}' % (b"9" * 4000)),
    ):
        assert words in served.refused("POST", STEER, body)


def test_a_tokenizer_that_panics_is_reported_and_the_server_continues(served):
    backend = served.lm.tokenizer.backend_tokenizer
    own, backend.pre_tokenizer = backend.pre_tokenizer, pre_tokenizers.FixedLength(length=0)
    audited = texts_of([{"id": "a", "text": TEXT}])
    try:
        error = served.refused("POST", STEER, BODY, expected=409)
        events = served.events("/api/audits", audited)
    finally:
        backend.pre_tokenizer = own
    for message in (error, events[-1][1]["error"]):
        assert "chunk size must be non-zero" in message
    assert served.events("/api/audits", audited)[-1][0] == "done"


def test_a_result_that_is_not_valid_is_a_conflict(served, monkeypatch):
    def fails(*_):
        raise DecompositionError("the parts do not sum to the logit")

    monkeypatch.setattr(type(served.lm), "lens_for", fails)
    error = served.refused("GET", "/api/documents?id=a", expected=409)
    assert error == "the parts do not sum to the logit"


def test_texts_that_are_too_long(served, named):
    """The smaller bound, of the explorer or the model, is named."""
    for server, bound in ((named, "the explorer reads at most"), (served, "tiny reads at most")):
        assert bound in server.refused("POST", STEER, BODY | {"text": "word " * 100_000})
    error = served.refused("POST", "/api/v1/completions", b" " * 16_000_001, expected=413)
    assert "at most 16,000,000" in error
