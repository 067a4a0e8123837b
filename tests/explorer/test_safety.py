"""Who gets an answer and who does not, over real HTTP."""

import json
import socket
from http.cookies import SimpleCookie

import pytest

from tests.explorer.conftest import TOKEN

TEXT = "The patient was given a dose"
ASKED = {"text": TEXT, "generate": 1}


def test_the_key_in_the_address_becomes_a_cookie_that_other_sites_cannot_use(served):
    status, headers, _ = served.ask("GET", "/?token=the-key-of-this-run", key=None)
    assert status == 303
    assert headers["location"] == "/"
    (cookie,) = SimpleCookie(headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    sent = {"Cookie": f"{cookie.key}={cookie.value}"}
    status, headers, body = served.ask("GET", "/", headers=sent, key=None)
    assert status == 200
    assert b"the-key-of-this-run" not in body
    assert "script-src 'self';" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "key", "expected"),
    [
        ("GET", "/", {}, None, 401),
        ("GET", "/?token=another", {}, None, 401),
        ("GET", "/api/model", {"Cookie": "prismlm-1=another"}, None, 401),
        ("GET", "/static/explorer.js", {}, None, 401),
        ("GET", "/api/model", {}, "another", 401),
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


@pytest.mark.parametrize(
    ("kind", "expected"), [("text/plain", 415), ("application/x-www-form-urlencoded", 415)]
)
def test_only_json_is_read(served, kind, expected):
    body = json.dumps(ASKED).encode()
    status, _, data = served.ask("POST", "/api/ask", body, {"Content-Type": kind})
    assert status == expected, data


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"text": ""}, "text"),
        ({"text": "a", "generate": -1}, "generate"),
        ({"text": "a", "generate": 10**9}, "generate"),
        ({"text": "a", "temperature": 1e308}, "temperature"),
        ({"text": "word " * 100_000}, "tokens"),
        ({}, "text"),
        (b"{", "JSON"),
        (b'{"text": "\\ud800"}', "unicode"),
        (b'{"text": "a", "temperature": NaN}', "temperature"),
    ],
)
def test_what_cannot_be_asked_is_told(served, asked, words):
    status, _, data = served.ask("POST", "/api/ask", asked)
    assert status == 422, data
    assert words in json.loads(data)["error"]


def test_a_text_too_long_for_the_explorer_and_the_model_is_told_the_lesser_bound(served, named):
    for server, bound in ((named, "the explorer reads 60"), (served, "tiny reads 512")):
        status, _, data = server.ask("POST", "/api/ask", {"text": "word " * 100_000})
        assert status == 422, data
        assert bound in json.loads(data)["error"]


def test_more_than_is_read_at_once(served):
    status, _, data = served.ask("POST", "/api/ask", b" " * 16_000_001)
    assert status == 413
    assert "at most 16,000,000" in json.loads(data)["error"]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # What comes after five bytes is no part of the body.
        ("Content-Length: 5", b"422"),
        ("Transfer-Encoding: chunked", b"411"),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", b"411"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", b"411"),
    ],
)
def test_a_body_that_is_longer_than_it_says_is_not_read(served, lengths, expected):
    body = json.dumps(ASKED).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = (
        f"POST /api/ask HTTP/1.1\r\nHost: {served.host}\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\n{lengths}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head.encode() + (chunked if "chunked" in lengths else body))
        assert connection.recv(100).split()[1] == expected
