"""The search finds what looking through every text finds."""

import pytest

import prismlm
from prismlm.lens.labels.catalogue import Catalogue
from prismlm.lens.labels.write import write_columns
from tests.helpers.lens_files import named_model


@pytest.fixture(scope="module")
def catalogue(lm):
    return Catalogue(lm.lens)


def looked_through(catalogue, query, sort):
    words, texts = query.lower().split(), catalogue.texts
    found = [int(n) for n in catalogue.orders[sort] if all(word in texts[n] for word in words)]
    if sort in ("text", "usage", "score"):
        found.sort(
            key=lambda n: not all(word in catalogue.rows[n]["name"].lower() for word in words)
        )
    return found


@pytest.mark.parametrize("sort", ["text", "usage", "score", "name", "id"])
def test_queries_of_every_length(catalogue, sort):
    for query in ("", "THE and", "#3", "zzzq"):
        expected = looked_through(catalogue, query, sort)
        assert catalogue.search(query, sort, everything=True).tolist() == expected
        listed = [number for number in expected if catalogue.lens.cell_sizes[number] >= 10]
        assert catalogue.search(query, sort).tolist() == listed


def test_numbers_names_tokens_and_contexts_are_searched(catalogue):
    lens = catalogue.lens
    context = next(row for row in lens.index.to_pylist() if row["after"])
    words, number = sorted(context["after"].split(), key=len)[-2:], context["prototype"]
    token = lens.prototypes["top_tokens"][number].as_py()[0]
    for query in (f"#{number}", lens.names[number], token, " ".join(words)):
        assert number in catalogue.search(query, "id", everything=True)


def test_new_names_are_listed_whoever_notices_them_first_and_scores_order_them(
    tiny_model, tmp_path
):
    lens = named_model(tiny_model, tmp_path / "model").lens
    catalogue = Catalogue(lens)
    assert catalogue.current().row(7)["name"] == "word7 → next7"
    names = [f"new {number}" for number in range(lens.num_prototypes)]
    write_columns(prismlm.load(tmp_path / "model").lens, {"name": names}, map=None)
    _ = lens.cells  # as an answer reads them
    assert catalogue.current().row(7)["name"] == "new 7"
    # Of names that tell as much those with most text come first.
    scores = [[1.0, None, 0.5][number % 3] for number in range(lens.num_prototypes)]
    write_columns(lens, {"label_score": scores}, map=None)
    order, sizes = Catalogue(lens).orders["score"].tolist(), lens.cell_sizes
    keys = [(-(scores[number] or -1.0), -sizes[number]) for number in order]
    assert keys == sorted(keys)
