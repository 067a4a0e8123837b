"""What pages show, as plain data."""

import numpy as np
import pytest

import prismlm
from prismlm.lens.where import UNKNOWN, Keys
from prismlm.pages.trace_data import safe_link, trace_data, visible


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


def test_what_the_lens_does_not_know_has_no_shares(tiny_model, monkeypatch):
    lm = prismlm.load(tiny_model)
    assert lm.lens.telling == "domain"
    rows = lm.lens.mass.num_rows
    monkeypatch.setitem(lm.lens._keys, ("mass", "domain"), Keys([UNKNOWN], np.zeros(rows, int)))
    assert lm.lens.telling == "source"
    data = trace_data(lm.explain("The proof relies on"))
    assert [group["by"] for group in data["whole"]["shares"]] == ["source", "license"]
    assert all([group["by"] for group in step["shares"]] == ["source"] for step in data["steps"])
