"""Passages and documents by hand, on cells of six positions."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from prismlm.explain import positions
from prismlm.explain.attribution import attribute
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import TEMPERATURE
from prismlm.index import layout, neighbours
from prismlm.index.lens import Lens
from prismlm.index.positions import quantise, record_type
from prismlm.index.sort_cells import Spool, write_cells
from prismlm.layers import PrototypeHead
from prismlm.progress import SILENT

# cell, next token, position, angle of the state to (1, 0) in degrees; 0 to 99 are of document "a",
# 100 to 199 of "b"
POSITIONS = [
    (0, 5, 10, 0),
    (0, 5, 20, 8),
    (1, 5, 60, 8),
    (0, 6, 30, 0),
    (1, 5, 150, 0),
    (2, 5, 5, -4),
]


@pytest.fixture
def lens(tmp_path):
    records = np.empty(len(POSITIONS), record_type(2))
    for column, name in enumerate(("cell", "token", "position")):
        records[name] = [row[column] for row in POSITIONS]
    angles = np.deg2rad([row[3] for row in POSITIONS])
    states = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    records["scale"], records["code"] = quantise(states)
    # Position 20 is after token 4, all others are after token 7.
    records["probability"], records["read"] = 0.5, [7, 4, 7, 7, 7, 7]
    spool = Spool(tmp_path / "spool", 2)
    spool.add(records)
    spool.flush()
    cells = write_cells(tmp_path, [spool], 3, 8, 1.0, SILENT)
    documents = {
        "doc_id": ["a", "b"],
        "source": ["s1", "s2"],
        "domain": ["law", None],
        "license": ["CC0", None],
        "title": [None, "B"],
        "url": [None, None],
        "start": [0, 100],
        "length": [100, 301],
    }
    schema = pa.schema(
        [(name, pa.string()) for name in list(documents)[:6]]
        + [("start", pa.int64()), ("length", pa.int64())]
    )
    table = pa.table(documents, schema=schema)
    layout.write_table(table, tmp_path / layout.CELL_DOCUMENTS_FILE)
    meta = layout.LensMeta(
        "",
        "",
        "",
        "c",
        "/nowhere",
        "train",
        None,
        8,
        8,
        2,
        2,
        100,
        True,
        cells=cells,
        files=layout.describe_files(tmp_path),
    )
    head = PrototypeHead(2, 3, 3)
    head.place_on(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    return Lens(tmp_path, meta, head)


@pytest.fixture
def table():
    """One prediction of token 5 at (1, 0), by prototypes 0 and 1; the third speaks against it."""
    return EvidenceTable(
        torch.tensor([[0, 1, 2]]),
        torch.tensor([[2.0, 1.0, -4.0]]),
        torch.tensor([1.0]),
        torch.tensor([-1.0]),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([3]),
        torch.tensor([5]),
    )


def test_shares_by_hand(lens, table):
    # Positions 10 and 150 lie at the state itself, 20 and 60 at 8 degrees from it; 30 has another
    # next token, and the prototype of 5 speaks against.
    far = np.exp((np.cos(np.deg2rad(8)) - 1) / TEMPERATURE)
    near = 3 / (2 + 2 * far) / 4  # evidence 3 of 4, the residual's 1 is unattributed
    found = attribute(table, lens)
    assert found.places.place.tolist() == [10, 20, 60, 150]
    np.testing.assert_allclose(
        found.places.value / found.total, [near, near * far, near * far, near], rtol=2e-2
    )
    by_domain = found.sources("domain")
    shares = {item.key: item.share for item in by_domain.items}
    assert shares == pytest.approx({"law": near * (1 + 2 * far), "(unknown)": near}, rel=2e-2)
    assert by_domain.unattributed == pytest.approx(1 / 4)
    # Of 99 and 300 positions: the last token of a document predicts nothing.
    rates = {item.key: item.base_rate for item in by_domain.items}
    assert rates == pytest.approx({"law": 99 / 399, "(unknown)": 300 / 399})
    assert by_domain.items[0].lift == pytest.approx(by_domain.items[0].share / (99 / 399))


@pytest.mark.parametrize(("named", "unplaced"), [(1, 1), (2, 0)])
def test_what_no_heavy_place_relies_on_is_unattributed(lens, table, monkeypatch, named, unplaced):
    # The prediction is 37 degrees from prototype 1, its furthest; places at (1, 0) are at 45. Of
    # the two that weigh most, 10 is in the cell of prototype 0 and 150 in that of 1.
    monkeypatch.setattr(positions, "HEAVIEST", named)
    angles = np.deg2rad([0, -45, -20])
    lens.head.place_on(torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1)))
    state = torch.tensor([[np.cos(np.deg2rad(-8)), np.sin(np.deg2rad(-8))]], dtype=torch.float32)
    found = attribute(replace(table, states=state), lens)
    assert found.places.place.tolist() == [10, 20, 60, 150]
    assert found.places.value.sum() / found.total == pytest.approx((3 - unplaced) / 4)
    assert found.unplaced / found.total == pytest.approx(unplaced / 4)
    assert found.sources("domain").unattributed == pytest.approx((1 + unplaced) / 4)


def test_heavy_is_what_weighs_most_by_itself(lens, table, monkeypatch):
    # One of each range is read: 10, at 8 degrees, stands for two; 5, at 4 degrees, for itself. It
    # is in the cell of prototype 2, which 10 is too far from to rely on.
    monkeypatch.setattr(neighbours, "MOST_OF_A_RANGE", 1)
    monkeypatch.setattr(positions, "HEAVIEST", 1)
    angles = np.deg2rad([0, -45, -20])
    lens.head.place_on(torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1)))
    state = torch.tensor([[np.cos(np.deg2rad(-8)), np.sin(np.deg2rad(-8))]], dtype=torch.float32)
    asked = replace(
        table, states=state, indices=torch.tensor([[0, 2]]), evidence=torch.tensor([[2.0, 1.0]])
    )
    found = attribute(asked, lens)
    assert found.places.place.tolist() == [5, 10]
    assert found.places.value[1] > found.places.value[0]
    assert found.unplaced == 0


def test_a_position_after_the_same_token_counts_ten_times(lens, table):
    found = attribute(replace(table, read=torch.tensor([4])), lens)
    far = np.exp((np.cos(np.deg2rad(8)) - 1) / TEMPERATURE)
    shares = np.array([1, 10 * far, far, 1]) / (2 + 11 * far) * 3 / 4
    np.testing.assert_allclose(found.places.value / found.total, shares, rtol=2e-2)


def test_passages_by_hand(lens, table):
    found = attribute(table, lens)
    first, second, third = found.passages()
    # 10 and 20 are one passage, 60 is further than 24 tokens from 20; marked is the next token.
    assert (first.doc_id, first.position, first.length) == ("a", 11, 11)
    assert (second.doc_id, second.position, second.title) == ("b", 151, "B")
    assert (third.doc_id, third.position, third.length) == ("a", 61, 1)
    assert first.share + third.share == pytest.approx(found.document_share("a"))
    assert first.cosine == pytest.approx(1, abs=0.01)
    assert first.text is None  # the corpus is not at hand
    assert first.for_or_against == "for"
    assert [p.doc_id for p in found.passages(where={"license": "CC0"})] == ["a", "a"]
    assert [d.doc_id for d in found.documents()] == ["a", "b"]
    assert found.documents()[0].position == 11


def test_a_filter_leaves_the_rest_elsewhere(lens, table):
    found = attribute(table, lens)
    shares = found.sources("source", {"license": "CC0"})
    assert [item.key for item in shares.items] == ["s1"]
    assert shares.elsewhere == pytest.approx(found.document_share("b"))
    assert sum(i.share for i in shares.items) + shares.elsewhere + 0.25 == pytest.approx(1)


def test_without_a_scale_or_predictions_there_is_no_support(lens, table):
    assert attribute(table, lens).support is None
    assert attribute(table[:0], lens).support is None


def test_no_document_of_this_name_has_no_share(lens, table):
    assert attribute(table, lens).document_share("c") == 0
