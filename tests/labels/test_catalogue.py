"""The search finds what looking through every text finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prismlm
from prismlm.labels.catalogue import Catalogue


@pytest.fixture(scope="module")
def catalogue(tiny_model):
    return Catalogue(prismlm.load(tiny_model).lens)


def looked_through(catalogue, query, sort):
    words, texts = query.lower().split(), catalogue.texts
    sought = [word.encode(errors="replace") for word in words]
    found = [int(n) for n in catalogue.orders[sort] if all(word in texts[n] for word in sought)]
    if sort in ("usage", "score"):
        found.sort(
            key=lambda n: not all(word in catalogue.rows[n]["name"].lower() for word in words)
        )
    return found


@pytest.mark.parametrize("sort", ["usage", "score", "name", "id"])
@pytest.mark.parametrize(
    "query", ["", "the", "THE and", "#3", "ab", "e", "東京", "·", "zzzq", "\ud800"]
)
def test_queries_of_every_length(catalogue, query, sort):
    assert catalogue.search(query, sort) == looked_through(catalogue, query, sort)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_stands_in_a_text_is_found(catalogue, data):
    number = data.draw(st.integers(0, len(catalogue.texts) - 1))
    text = catalogue.texts[number].decode()
    first = data.draw(st.integers(0, len(text) - 1))
    query = text[first : first + data.draw(st.integers(1, 12))]
    found = catalogue.search(query, "id")
    assert number in found
    assert found == looked_through(catalogue, query, "id")
