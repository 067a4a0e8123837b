"""Shares, passages and documents by hand and against loops, on a lens of six positions."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.explain import attribution
from prismlm.explain.attribution import TEMPERATURE
from prismlm.lens import cells as cells_module
from tests.explain.conftest import shares_of
from tests.helpers.hand_lens import attributed, hand_lens, predictions


@pytest.fixture(scope="module")
def lens(tmp_path_factory):
    return hand_lens(tmp_path_factory.mktemp("lens"))


@pytest.fixture
def table():
    """One prediction of token 5 at (1, 0), by prototypes 0 and 1; the third speaks against it."""
    columns = [[0, 1, 2]], [[2.0, 1.0, -4.0]], [1.0], [-1.0], [[1.0, 0.0]], [3], [5]
    return predictions(*map(torch.tensor, columns))


def test_shares_by_hand(lens, table):
    # Positions 10 and 150 lie at the state itself, 20 and 60 at 8 degrees from it; 30 has another
    # next token, and the prototype of 5 speaks against.
    far = np.exp((np.cos(np.deg2rad(8)) - 1) / TEMPERATURE)
    near = 3 / (2 + 2 * far) / 4  # evidence 3 of 4, the residual's 1 is unattributed
    found = attributed(table, lens)
    assert found.places.place.tolist() == [10, 20, 60, 150]
    np.testing.assert_allclose(
        found.places.value / found.total, [near, near * far, near * far, near], rtol=2e-2
    )
    by_domain = found.sources("domain")
    expected = {"law": near * (1 + 2 * far), "(unknown)": near}
    assert shares_of(by_domain) == pytest.approx(expected, rel=2e-2)
    assert by_domain.unattributed == pytest.approx(1 / 4)
    # Of 99 and 300 positions: the last token of a document predicts nothing.
    rates = {item.key: item.base_rate for item in by_domain.items}
    assert rates == pytest.approx({"law": 99 / 399, "(unknown)": 300 / 399})
    # A quarter of the evidence has no domain.
    expected = 99 / 399 * 3 / 4
    assert by_domain.items[0].lift == pytest.approx(by_domain.items[0].share / expected)


def test_heavy_is_what_weighs_most_by_itself(table, monkeypatch, tmp_path):
    lens = hand_lens(tmp_path)
    # One of each range is read: 10, at 8 degrees, stands for two; 5, at 4 degrees, for itself. It
    # is in the cell of prototype 2, which 10 is too far from to rely on.
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 1)
    monkeypatch.setattr(attribution, "HEAVIEST", 1)
    angles = np.deg2rad([0, -45, -20])
    lens.head.place_on(torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1)))
    state = torch.tensor([[np.cos(np.deg2rad(-8)), np.sin(np.deg2rad(-8))]], dtype=torch.float32)
    prototypes, evidence = torch.tensor([[0, 2]]), torch.tensor([[2.0, 1.0]])
    none = torch.zeros(1)
    asked = predictions(prototypes, evidence, none, none, state, table.tokens, table.targets)
    found = attributed(asked, lens)
    assert found.places.place.tolist() == [5, 10]
    assert found.places.value[1] > found.places.value[0]
    assert found.rest == 0


def test_passages_by_hand(lens, table):
    found = attributed(table, lens)
    first, second, third = found.passages()
    # 10 and 20 are one passage, 60 is further than 24 tokens from 20; marked is the next token.
    assert (first.doc_id, first.position, first.length) == ("a", 11, 11)
    assert (second.doc_id, second.position, second.title) == ("b", 151, "B")
    assert (third.doc_id, third.position, third.length) == ("a", 61, 1)
    assert first.share + third.share == pytest.approx(found.document_share("a"))
    assert found.document_share("c") == 0
    assert first.cosine == pytest.approx(1, abs=0.01)
    assert first.text is None  # the corpus is not at hand
    assert [p.doc_id for p in found.passages(where={"license": "CC0"})] == ["a", "a"]
    assert [d.doc_id for d in found.documents()] == ["a", "b"]
    assert found.documents()[0].position == 11
    # Without a scale, or predictions, there is no support.
    assert found.support() is attributed(table[:0], lens).support() is None


def by_contexts(indices, activations):
    """Return predictions of which the measure of PRISM, A_t, knows the activations alone."""
    count, indices = len(indices), torch.tensor(indices)
    evidence, residual = torch.full(indices.shape, -9.0), torch.full((count,), 7.0)
    states, tokens = torch.full((count, 2), 0.5**0.5), torch.zeros(count, dtype=torch.int64)
    others = states, tokens, tokens, torch.tensor(activations)
    return predictions(indices, evidence, residual, torch.zeros(count), *others)


def test_the_measure_of_the_source_by_hand(lens):
    # a: 0.6/2 + 0.2, b: 0.6/2, of 0.8; neither evidence nor the residual plays a part.
    found = attributed(by_contexts([[0, 1]], [[0.6, 0.2]]), lens, "source")
    documents = found.documents()
    of_documents = [(one.doc_id, one.position, one.share) for one in documents]
    assert of_documents == [("a", 10, pytest.approx(5 / 8)), ("b", 120, pytest.approx(3 / 8))]
    assert shares_of(found.sources("document")) == pytest.approx({"a": 5 / 8, "b": 3 / 8})
    shares = found.sources("source")
    assert shares.unattributed == 0
    assert {item.base_rate for item in shares.items} == {None}
    assert shares.to_dict()["method"] == "source"
    # Nothing is in use.
    found = attributed(by_contexts([[0, 1]], [[0.0, -1.0]]), lens, "source")
    assert (found.sources("source").items, found.sources("source").unattributed) == ((), 1.0)
    assert found.documents() == []


def test_a_filter_by_hand(lens):
    evidence = by_contexts([[0, 1], [2, 0]], [[0.6, 0.2], [0.4, 0.0]])
    found = attributed(evidence, lens, "source")
    shares = found.sources("domain", {"license": "CC0"})
    # Of prototype 0 the half in law is CC0, and all of prototype 1; prototype 2 has no text.
    assert shares_of(shares) == {"law": pytest.approx(0.5 / 1.2)}
    assert shares.elsewhere == pytest.approx(0.3 / 1.2)
    assert shares.unattributed == pytest.approx(0.4 / 1.2)
    assert shares.to_dict()["where"] == {"license": ["CC0"]}
    none = found.sources("domain", {"source": "s1", "license": "(unknown)"})
    assert none.items == ()
    assert none.elsewhere == pytest.approx(0.8 / 1.2)
    assert [d.doc_id for d in found.documents(where={"source": "s2"})] == ["b"]


def test_what_is_not_there_is_named(lens, table):
    for given, words in (
        ({"by": "domains"}, "Did you mean 'domain'"),
        ({"where": {"sourc": "s1"}}, "Did you mean 'source'"),
        ({"where": {"source": "s3"}}, r"source=s3.*s1, s2"),
    ):
        with pytest.raises(InputError, match=words):
            attributed(table, lens).sources(**given)
    with pytest.raises(InputError, match="Did you mean 'source'"):
        attributed(table, lens, "sources")
