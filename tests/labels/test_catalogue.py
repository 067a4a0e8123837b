"""The search finds what looking through every text finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prismlm
from prismlm.labels.catalogue import Catalogue


@pytest.fixture(scope="module")
def catalogue(tiny_model):
    return Catalogue(prismlm.load(tiny_model).lens)


@pytest.fixture(scope="module")
def texts(catalogue):
    return catalogue.texts


def looked_through(catalogue, texts, query, sort):
    words = query.lower().split()
    found = [int(n) for n in catalogue.orders[sort] if all(word in texts[n] for word in words)]
    if sort in ("text", "usage", "score"):
        found.sort(
            key=lambda n: not all(word in catalogue.rows[n]["name"].lower() for word in words)
        )
    return found


@pytest.mark.parametrize("sort", ["text", "usage", "score", "name", "id"])
@pytest.mark.parametrize(
    "query", ["", "the", "THE and", "#3", "ab", "e", "東京", "·", "zzzq", "\ud800"]
)
def test_queries_of_every_length(catalogue, texts, query, sort):
    expected = looked_through(catalogue, texts, query, sort)
    assert catalogue.search(query, sort, everything=True).tolist() == expected
    sizes = catalogue.lens.cell_sizes
    listed = [number for number in expected if sizes[number] >= 10]
    assert catalogue.search(query, sort).tolist() == listed


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_stands_in_a_text_is_found(catalogue, texts, data):
    number = data.draw(st.integers(0, len(texts) - 1))
    text = texts[number]
    first = data.draw(st.integers(0, len(text) - 1))
    query = text[first : first + data.draw(st.integers(1, 12))]
    found = catalogue.search(query, "id", everything=True).tolist()
    assert number in found
    assert found == looked_through(catalogue, texts, query, "id")


def test_of_names_that_tell_as_much_those_with_most_text_come_first(tiny_model, monkeypatch):
    catalogue = Catalogue(prismlm.load(tiny_model).lens)
    for number, row in enumerate(catalogue.rows):
        monkeypatch.setitem(row, "label_score", [1.0, None, 0.5][number % 3])
    rows = [catalogue.rows[number] for number in catalogue.orders["score"]]
    sizes = catalogue.lens.cell_sizes
    keys = [(-(row["label_score"] or -1.0), -sizes[row["prototype"]]) for row in rows]
    assert keys == sorted(keys)
