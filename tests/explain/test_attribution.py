"""Shares against loops written from the definitions, on a lens of three prototypes."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.errors import InputError
from prismlm.explain.attribution import attribute, merge_attributions
from prismlm.explain.evidence import EvidenceTable
from prismlm.index import layout
from prismlm.index.lens import Lens
from prismlm.layers import PrototypeHead

CONTEXTS = [
    # prototype, rank, position, doc_id, source, domain, license; prototype 2 is never used
    (0, 0, 10, "a", "s1", "law", "CC0"),
    (0, 1, 20, "b", "s2", "medicine", None),
    (1, 0, 30, "a", "s1", "law", "CC0"),
]
MASS = [
    (0, "s1", "law", "CC0", 4, 3.0),
    (0, "s2", "medicine", None, 2, 1.0),
    (1, "s1", "law", "CC0", 1, 5.0),
]


def source_shares(table, lens, by="source", *, method="source", where=None):
    return attribute(table, lens, method).sources(by, where)


def document_shares(table, lens, *, where=None):
    return attribute(table, lens, "source").documents(where=where)


@pytest.fixture(scope="module")
def lens(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lens")
    rows = [
        {
            "prototype": p,
            "rank": rank,
            "cosine": 0.9,
            "activation": 0.9,
            "routed": True,
            "position": position,
            "doc_id": doc_id,
            "source": source,
            "domain": domain,
            "license": license,
            "title": None,
            "url": None,
            "before": f"before {position} ",
            "token": "here",
            "after": " after",
        }
        for p, rank, position, doc_id, source, domain, license in CONTEXTS
    ]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=layout.INDEX_SCHEMA), directory / layout.INDEX_FILE
    )
    mass = [dict(zip(layout.MASS_SCHEMA.names, row, strict=True)) for row in MASS]
    pq.write_table(
        pa.Table.from_pylist(mass, schema=layout.MASS_SCHEMA), directory / layout.MASS_FILE
    )
    meta = layout.LensMeta(
        "",
        "",
        "",
        "c",
        "/c",
        "train",
        None,
        8,
        8,
        2,
        2,
        100,
        with_text=True,
        cells={},
        files=layout.describe_files(directory),
    )
    return Lens(directory, meta, PrototypeHead(2, 3, 2))


def table(indices, activations):
    count = len(indices)
    return EvidenceTable(
        torch.tensor(indices),
        torch.full((count, len(indices[0])), -9.0),
        torch.full((count,), 7.0),
        torch.zeros(count),
        torch.nn.functional.normalize(torch.ones(count, 2), dim=-1),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        torch.tensor(activations),
    )


def test_documents_stand_at_their_weightiest_place(lens):
    found = document_shares(table([[0, 1]], [[0.6, 0.2]]), lens)
    # a: 0.6/2 + 0.2, b: 0.6/2, of 0.8.
    assert [(one.doc_id, one.position) for one in found] == [("a", 10), ("b", 20)]
    assert [one.share for one in found] == pytest.approx([0.5 / 0.8, 0.3 / 0.8])
    assert found[0].text == "before 10 here after"


def test_a_prototype_without_text_is_unattributed(lens):
    evidence = table([[0, 2]], [[1.0, 3.0]])
    for by in ("domain", "document"):
        assert source_shares(evidence, lens, by).unattributed == pytest.approx(0.75)


def test_nothing_in_use_at_all(lens):
    evidence = table([[0, 1]], [[0.0, -1.0]])
    shares = source_shares(evidence, lens, "source")
    assert shares.items == ()
    assert shares.unattributed == 1.0
    assert document_shares(evidence, lens) == []


def test_unknown_roll_up(lens):
    evidence = table([[0]], [[1.0]])
    with pytest.raises(InputError, match="Did you mean 'domain'"):
        source_shares(evidence, lens, "domains")


def test_rows_of_an_unknown_prototype(lens):
    with pytest.raises(InputError, match="from 0 to 2"):
        lens.rows_of(3)


def random_table(seed, positions, prototypes=3, used=2):
    generator = torch.Generator().manual_seed(seed)
    evidence = torch.randn(positions, used, generator=generator)
    picked = [torch.randperm(prototypes, generator=generator)[:used] for _ in range(positions)]
    return EvidenceTable(
        torch.stack(picked),
        evidence,
        torch.randn(positions, generator=generator),
        torch.randn(positions, generator=generator),
        torch.nn.functional.normalize(torch.randn(positions, 2, generator=generator), dim=-1),
        torch.zeros(positions, dtype=torch.int64),
        torch.zeros(positions, dtype=torch.int64),
        torch.rand(positions, used, generator=generator) * (evidence > -1),
    )


def naive_measure(evidence):
    """Return Σ_t A_t = Σ_t Σ_i α_ti μ_{S_i} as {context: mass}, and Σ α."""
    mass, total = [0.0] * len(CONTEXTS), 0.0
    for indices, activations in zip(evidence.indices, evidence.activations, strict=True):
        for i, activation in zip(indices.tolist(), activations.tolist(), strict=True):
            total += activation
            nearest = [row for row, context in enumerate(CONTEXTS) if context[0] == i]
            for row in nearest:
                mass[row] += activation / len(nearest)
    return mass, total


@given(seed=st.integers(0, 10_000), positions=st.integers(1, 6))
def test_the_measure_of_the_source_equals_a_loop(lens, seed, positions):
    evidence = random_table(seed, positions)
    mass, total = naive_measure(evidence)
    if total == 0:
        return
    shares = source_shares(evidence, lens, "document", method="source")
    wanted = {}
    for context, amount in zip(CONTEXTS, mass, strict=True):
        wanted[context[3]] = wanted.get(context[3], 0.0) + amount / total
    assert {i.key: i.share for i in shares.items} == pytest.approx(
        {k: v for k, v in wanted.items() if v > 0}, rel=1e-6
    )
    assert shares.unattributed == pytest.approx(1 - sum(mass) / total, abs=1e-6)
    # Roll-ups of this measure count contexts, not the mass.
    wanted = {}
    for context, amount in zip(CONTEXTS, mass, strict=True):
        wanted[context[4]] = wanted.get(context[4], 0.0) + amount / total
    by_source = source_shares(evidence, lens, "source", method="source")
    assert {i.key: i.share for i in by_source.items} == pytest.approx(
        {k: v for k, v in wanted.items() if v > 0}, rel=1e-6
    )
    for by in ("source", "domain", "license", "document"):
        shares = source_shares(evidence, lens, by)
        values = [item.share for item in shares.items]
        assert sum(values) + shares.unattributed == pytest.approx(1.0, abs=1e-6)
        assert values == sorted(values, reverse=True)
    assert by_source.to_dict()["method"] == "source"


def test_the_measure_by_hand(lens):
    evidence = EvidenceTable(
        torch.tensor([[0, 1]]),
        torch.tensor([[-9.0, 5.0]]),
        torch.tensor([7.0]),
        torch.tensor([0.0]),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([3]),
        torch.tensor([0]),
        torch.tensor([[0.6, 0.2]]),
    )
    # a: 0.6/2 + 0.2, b: 0.6/2, of 0.8; neither evidence nor the residual plays a part.
    shares = source_shares(evidence, lens, "document", method="source")
    assert [(i.key, i.share) for i in shares.items] == [
        ("a", pytest.approx(0.5 / 0.8)),
        ("b", pytest.approx(0.3 / 0.8)),
    ]
    assert shares.unattributed == 0


@given(seed=st.integers(0, 10_000))
def test_parts_of_a_text_add_up(lens, seed):
    evidence = random_table(seed, 7)
    whole, *parts = (
        attribute(one, lens, "source") for one in (evidence, evidence[:3], evidence[3:])
    )
    parts = merge_attributions(parts)
    assert parts.total == pytest.approx(whole.total, rel=1e-9)
    for by in ("document", "source"):
        a, b = whole.sources(by), parts.sources(by)
        assert {i.key: i.share for i in a.items} == pytest.approx(
            {i.key: i.share for i in b.items}, rel=1e-6
        )


def test_a_filter_by_hand(lens):
    evidence = table([[0, 1], [2, 0]], [[0.6, 0.2], [0.4, 0.0]])
    shares = source_shares(evidence, lens, "domain", where={"license": "CC0"})
    # Of prototype 0 the half in law is CC0, and all of prototype 1; prototype 2 has no text.
    assert [(i.key, i.share) for i in shares.items] == [("law", pytest.approx(0.5 / 1.2))]
    assert shares.elsewhere == pytest.approx(0.3 / 1.2)
    assert shares.unattributed == pytest.approx(0.4 / 1.2)
    assert shares.to_dict()["where"] == {"license": ["CC0"]}
    none = source_shares(evidence, lens, "domain", where={"source": "s1", "domain": "medicine"})
    assert none.items == ()
    assert none.elsewhere == pytest.approx(0.8 / 1.2)
    assert [d.doc_id for d in document_shares(evidence, lens, where={"source": "s2"})] == ["b"]


@pytest.mark.parametrize("by", ["document", "source", "domain", "license"])
@given(seed=st.integers(0, 10_000))
def test_filtered_shares_sum_to_one(lens, by, seed):
    evidence = random_table(seed, 3)
    for where in ({"source": ["s1", "s2"]}, {"license": "(unknown)"}, {"domain": "law"}):
        shares = source_shares(evidence, lens, by, where=where)
        total = sum(i.share for i in shares.items) + shares.elsewhere + shares.unattributed
        assert total == pytest.approx(1, abs=1e-6)
    everything = source_shares(evidence, lens, by, where={"source": ["s1", "s2"]})
    assert everything.elsewhere == 0
    assert everything.items == source_shares(evidence, lens, by).items


@pytest.mark.parametrize(
    ("where", "words"),
    [({"sourc": "s1"}, "Did you mean 'source'"), ({"source": "s3"}, r"source=s3.*s1, s2")],
)
def test_filters_that_name_what_is_not_there(lens, where, words):
    evidence = table([[0]], [[1.0]])
    with pytest.raises(InputError, match=words):
        source_shares(evidence, lens, "source", where=where)


def test_an_unknown_method(lens):
    evidence = table([[0]], [[1.0]])
    with pytest.raises(InputError, match="Did you mean 'source'"):
        source_shares(evidence, lens, method="sources")
    with pytest.raises(InputError, match="activations"):
        source_shares(replace(evidence, activations=None), lens)
