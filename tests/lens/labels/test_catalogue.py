"""The search finds what looking through every text finds."""

import pytest

import prismlm
from prismlm.lens.labels.catalogue import Catalogue


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
