"""Who gets an answer and who does not, over real HTTP."""

import json
import socket
from http.cookies import SimpleCookie

import pytest
from tokenizers import pre_tokenizers

from tests.explorer.conftest import TOKEN, texts_of

TEXT = "The patient was given a dose"
ASKED = {"text": TEXT, "generate": 1, "prototype": 1}
STEER = "/api/steer"


def test_the_key_in_the_address_becomes_a_cookie_that_other_sites_cannot_use(served):
    status, headers, _ = served.ask("GET", "/?token=the-key-of-this-run", key=None)
    assert status == 303
    assert headers["location"] == "/"
    (cookie,) = SimpleCookie(headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    assert cookie.key == f"prismlm-{served.port}"
    # A session: what reads the cookie has no key to give away.
    assert TOKEN not in cookie.value
    assert served.ask("GET", "/", key=cookie.value)[0] == 401
    sent = {"Cookie": f"{cookie.key}={cookie.value}"}
    status, headers, body = served.ask("GET", "/", headers=sent, key=None)
    assert status == 200
    assert b"the-key-of-this-run" not in body
    assert "script-src 'self';" in headers["content-security-policy"]


@pytest.mark.parametrize("other", ['a={"b": [1, "c"]}', "ü=ü", "", "a=1; a=2", "prismlm-1=x", '"'])
def test_cookies_of_other_programs_lock_nobody_out(served, other):
    _, headers, _ = served.ask("GET", f"/?token={TOKEN}", key=None)
    own = headers["set-cookie"].partition(";")[0]
    for sent in (f"{other}; {own}", f"{own}; {other}", f"{other};{own};{other}"):
        cookies = {"Cookie": sent.encode("utf-8")}
        assert served.ask("GET", "/api/model", headers=cookies, key=None)[0] == 200
    assert served.ask("GET", "/api/model", headers={"Cookie": other.encode()}, key=None)[0] == 401


def test_the_session_of_another_explorer_opens_nothing(served, named):
    _, headers, _ = named.ask("GET", f"/?token={TOKEN}", key=None)
    value = headers["set-cookie"].partition(";")[0].partition("=")[2]
    sent = {"Cookie": f"prismlm-{served.port}={value}"}
    assert served.ask("GET", "/", headers=sent, key=None)[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "headers", "key", "expected"),
    [
        ("GET", "/", {}, None, 401),
        ("GET", "/?token=another", {}, None, 401),
        ("GET", "/api/model", {"Cookie": "prismlm-1=another"}, None, 401),
        ("GET", "/static/explorer.js", {}, None, 401),
        ("GET", "/api/model", {}, "another", 401),
        ("POST", "/api/v1/completions", {}, "another", 401),
        # Another name for this address: what a page that rebinds its own name would send.
        ("GET", "/api/model", {"Host": "evil.example:80"}, "the-key-of-this-run", 421),
        ("GET", "/api/model", {"Origin": "http://evil.example"}, "the-key-of-this-run", 403),
        ("GET", "/static/../app.py", {}, "the-key-of-this-run", 404),
        ("GET", "/static/%2e%2e/app.py", {}, "the-key-of-this-run", 404),
        ("GET", "/static//etc/passwd", {}, "the-key-of-this-run", 404),
    ],
)
def test_what_is_refused(served, method, path, headers, key, expected):
    status, sent, body = served.ask(method, path, headers=headers, key=key)
    assert status == expected, body
    assert sent["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in sent


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_read(served, kind):
    body = json.dumps(ASKED).encode()
    status, _, data = served.ask("POST", STEER, body, {"Content-Type": kind})
    assert status == 415, data


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"text": ""}, "text"),
        ({"text": "a", "generate": -1}, "generate"),
        ({"text": "a", "generate": 10**9}, "generate"),
        ({"text": "a", "temperature": 1e308}, "temperature"),
        ({"text": "word " * 100_000, "prototype": 1}, "tokens"),
        ({}, "text"),
        (b"{", "JSON"),
        (b'{"text": "\\ud800"}', "unicode"),
        (b'{"text": "a", "temperature": NaN}', "temperature"),
        (b'{"text": "a", "seed": %s}' % (b"9" * 4000), "seed"),
    ],
)
def test_what_cannot_be_asked_is_told(served, asked, words):
    assert words in served.refused("POST", STEER, asked)


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"text": %s}' % (b"9" * 5000), b"\xff"])
@pytest.mark.parametrize("path", ["/api/audits", "/api/steer"])
def test_a_body_that_cannot_be_parsed_is_told(served, path, body):
    status, _, data = served.ask("POST", path, body)
    assert status == 400, data
    assert json.loads(data)["error"]


def test_a_tokenizer_that_panics_is_told_and_the_server_goes_on(served):
    backend = served.lm.tokenizer.backend_tokenizer
    own, backend.pre_tokenizer = backend.pre_tokenizer, pre_tokenizers.FixedLength(length=0)
    audited = texts_of([{"id": "a", "text": TEXT}])
    try:
        status, _, data = served.ask("POST", STEER, ASKED)
        told = served.events("/api/audits", audited)
    finally:
        backend.pre_tokenizer = own
    assert status == 409
    for said in (json.loads(data), told[-1][1]):
        assert "chunk size must be non-zero" in said["error"]
    assert served.events("/api/audits", audited)[-1][0] == "done"


def test_a_text_too_long_for_the_explorer_and_the_model_is_told_the_lesser_bound(served, named):
    for server, bound in ((named, "the explorer reads 60"), (served, "tiny reads 512")):
        assert bound in server.refused("POST", STEER, ASKED | {"text": "word " * 100_000})


def test_more_than_is_read_at_once(served):
    assert "at most 16,000,000" in served.refused(
        "POST", "/api/v1/completions", b" " * 16_000_001, expected=413
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # What comes after five bytes is no part of the body.
        ("Content-Length: 5", b"400"),
        ("Transfer-Encoding: chunked", b"411"),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", b"411"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", b"411"),
    ],
)
def test_a_body_that_is_longer_than_it_says_is_not_read(served, lengths, expected):
    body = json.dumps(ASKED).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = (
        f"POST /api/steer HTTP/1.1\r\nHost: {served.host}\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\n{lengths}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head.encode() + (chunked if "chunked" in lengths else body))
        assert connection.recv(100).split()[1] == expected
