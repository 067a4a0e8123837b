"""What pages show, as plain data."""

import pytest

from prismlm.pages.trace_data import safe_link, visible


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://example.org/a?b=1", "https://example.org/a?b=1"),
        (" http://example.org ", "http://example.org"),
        ("javascript:alert(1)", None),
        ("JAVASCRIPT:alert(1)", None),
        ("data:text/html,x", None),
        ("//example.org", None),
        ("https://[", None),
        ("", None),
        (None, None),
    ],
)
def test_links_are_http_or_none(url, safe):
    assert safe_link(url) == safe


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "·the"), ("\n\n", "↵↵"), ("  ", "␣␣"), ("\t", "⇥"), ("", "∅"), ("a b ", "a b·")],
)
def test_whitespace_is_visible(token, shown):
    assert visible(token) == shown
