"""Shares against loops written from the definitions, on a lens of three prototypes."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from prismlm.errors import InputError
from prismlm.explain.attribution import CONTEXT_TEMPERATURE, attribute, merge_attributions
from prismlm.explain.evidence import EvidenceTable
from prismlm.index import layout
from prismlm.index.lens import Lens
from prismlm.layers import PrototypeHead

MASS = [
    # prototype, source, domain, license, tokens, activation_sum; prototype 2 is never used
    (0, "s1", "law", "CC0", 4, 3.0),
    (0, "s2", "medicine", None, 2, 1.0),
    (1, "s2", "medicine", None, 1, 5.0),
]
CONTEXTS = [
    # prototype, rank, position, doc_id, state
    (0, 0, 10, "a", (1.0, 0.0)),
    (0, 1, 20, "b", (0.6, 0.8)),
    (1, 0, 30, "a", (0.0, 1.0)),
]


def source_shares(table, lens, by="source", *, method="evidence", where=None):
    return attribute(table, lens, method).sources(by, where)


def document_shares(table, lens, *, where=None):
    return attribute(table, lens).documents(where=where)


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
            "source": "s1",
            "domain": "law",
            "license": "CC0",
            "title": None,
            "url": None,
            "before": f"before {position} ",
            "token": "here",
            "after": " after",
        }
        for p, rank, position, doc_id, _ in CONTEXTS
    ]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=layout.INDEX_SCHEMA), directory / layout.INDEX_FILE
    )
    mass = [dict(zip(layout.MASS_SCHEMA.names, row, strict=True)) for row in MASS]
    pq.write_table(
        pa.Table.from_pylist(mass, schema=layout.MASS_SCHEMA), directory / layout.MASS_FILE
    )
    states = torch.tensor([c[4] for c in CONTEXTS]).bfloat16()
    save_file({"states": states}, str(directory / layout.CONTEXTS_FILE))
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
        files=layout.describe_files(directory),
    )
    return Lens(directory, meta, PrototypeHead(2, 3, 2))


def table(indices, evidence, residual, bias, states):
    return EvidenceTable(
        torch.tensor(indices),
        torch.tensor(evidence),
        torch.tensor(residual),
        torch.tensor(bias),
        torch.nn.functional.normalize(torch.tensor(states), dim=-1),
        torch.zeros(len(indices), dtype=torch.int64),
        torch.zeros(len(indices), dtype=torch.int64),
    )


def test_hand_computed_domains(lens):
    evidence = table([[0, 1]], [[2.0, 1.0]], [0.5], [-3.0], [[1.0, 0.0]])
    shares = source_shares(evidence, lens, "domain")
    # law: 2 · 3/4 = 1.5; medicine: 2 · 1/4 + 1 = 1.5; residual 0.5; the bias is negative.
    assert {item.key: item.share for item in shares.items} == pytest.approx(
        {"law": 1.5 / 3.5, "medicine": 1.5 / 3.5}
    )
    assert shares.unattributed == pytest.approx(0.5 / 3.5)
    by_license = source_shares(evidence, lens, "license")
    assert {item.key for item in by_license.items} == {"CC0", "(unknown)"}


def test_hand_computed_documents(lens):
    evidence = table([[0, 1]], [[2.0, 1.0]], [1.0], [0.0], [[2.0, 1.0]])
    # The state is (2, 1)/√5; 0.6 and 0.8 are 0.6016 and 0.8008 in bf16.
    near = 2 * math.exp((2 / 5**0.5 - 1) / 0.02)
    other = 2 * math.exp(((2 * 0.6015625 + 0.80078125) / 5**0.5 - 1) / 0.02)
    far = 1 * math.exp((1 / 5**0.5 - 1) / 0.02)
    shares = source_shares(evidence, lens, "document")
    both = near + other + far
    expected = {"a": 3 * (near + far) / both / 4, "b": 3 * other / both / 4}
    assert {item.key: item.share for item in shares.items} == pytest.approx(expected)
    documents = document_shares(evidence, lens)
    assert [d.doc_id for d in documents] == ["b", "a"]
    assert documents[0].share == pytest.approx(expected["b"])
    assert documents[0].position == 20
    assert documents[0].text == "before 20 here after"


def test_negative_evidence_is_never_netted(lens):
    evidence = table([[0, 1]], [[2.0, -50.0]], [0.0], [0.0], [[1.0, 0.0]])
    shares = source_shares(evidence, lens, "source")
    assert {item.key: item.share for item in shares.items} == pytest.approx(
        {"s1": 0.75, "s2": 0.25}
    )


def test_a_prototype_without_text_is_unattributed(lens):
    evidence = table([[0, 2]], [[1.0, 3.0]], [0.0], [0.0], [[1.0, 0.0]])
    for by in ("domain", "document"):
        assert source_shares(evidence, lens, by).unattributed == pytest.approx(0.75)


def test_no_positive_evidence_at_all(lens):
    evidence = table([[0, 1]], [[-1.0, 0.0]], [-1.0], [0.0], [[1.0, 0.0]])
    shares = source_shares(evidence, lens, "source")
    assert shares.items == ()
    assert shares.unattributed == 1.0
    assert document_shares(evidence, lens) == []


@given(seed=st.integers(0, 10_000), positions=st.integers(1, 6))
def test_shares_equal_a_loop_and_sum_to_one(lens, seed, positions):
    generator = torch.Generator().manual_seed(seed)
    evidence = EvidenceTable(
        torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(positions)]),
        torch.randn(positions, 2, generator=generator),
        torch.randn(positions, generator=generator),
        torch.randn(positions, generator=generator),
        torch.nn.functional.normalize(torch.randn(positions, 2, generator=generator), dim=-1),
        torch.zeros(positions, dtype=torch.int64),
        torch.zeros(positions, dtype=torch.int64),
    )
    expected, total = {}, 0.0
    for t in range(positions):
        total += max(0.0, evidence.residual[t].item()) + max(0.0, evidence.bias[t].item())
        for i, e in zip(evidence.indices[t].tolist(), evidence.evidence[t].tolist(), strict=True):
            e = max(0.0, e)
            total += e
            mass = [(row[1], row[5]) for row in MASS if row[0] == i]
            for source, activation in mass:
                share = e * activation / sum(m for _, m in mass)
                expected[source] = expected.get(source, 0.0) + share
    shares = source_shares(evidence, lens, "source")
    got = {item.key: item.share for item in shares.items}
    if total > 0:
        wanted = {k: v / total for k, v in expected.items() if v > 0}
        assert got == pytest.approx(wanted, rel=1e-5)
    for by in ("source", "domain", "license", "document"):
        shares = source_shares(evidence, lens, by)
        total_share = sum(item.share for item in shares.items) + shares.unattributed
        assert total_share == pytest.approx(1.0, abs=1e-6)
        values = [item.share for item in shares.items]
        assert values == sorted(values, reverse=True)


def test_unknown_roll_up(lens):
    evidence = table([[0]], [[1.0]], [0.0], [0.0], [[1.0, 0.0]])
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
    # All contexts are of one source; roll-ups of this measure count contexts, not the mass.
    by_source = source_shares(evidence, lens, "source", method="source")
    assert {i.key: i.share for i in by_source.items} == pytest.approx(
        {"s1": sum(mass) / total} if sum(mass) else {}, rel=1e-6
    )
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


@given(seed=st.integers(0, 10_000), positions=st.integers(1, 20))
def test_contexts_weigh_as_in_a_loop(lens, seed, positions):
    evidence = random_table(seed, positions)
    expected = np.zeros(len(CONTEXTS))
    for t in range(positions):
        weights, to_spread = np.zeros(len(CONTEXTS)), 0.0
        for i, e in zip(evidence.indices[t].tolist(), evidence.evidence[t].tolist(), strict=True):
            nearest = [row for row, context in enumerate(CONTEXTS) if context[0] == i]
            to_spread += max(0.0, e) if nearest else 0.0
            for row in nearest:
                cosine = float(lens.states[row].float() @ evidence.states[t])
                weights[row] += max(0.0, e) * math.exp((cosine - 1) / CONTEXT_TEMPERATURE)
        if to_spread:
            expected += to_spread * weights / weights.sum()
    contexts = attribute(evidence, lens).contexts
    got = np.zeros(len(CONTEXTS))
    got[contexts.ids] = contexts.values
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("method", ["evidence", "source"])
@given(seed=st.integers(0, 10_000))
def test_parts_of_a_text_add_up(lens, method, seed):
    evidence = random_table(seed, 7)
    whole = attribute(evidence, lens, method)
    parts = merge_attributions(
        [attribute(evidence[:3], lens, method), attribute(evidence[3:], lens, method)]
    )
    assert parts.total == pytest.approx(whole.total, rel=1e-9)
    for by in ("document", "source"):
        a, b = whole.sources(by), parts.sources(by)
        assert {i.key: i.share for i in a.items} == pytest.approx(
            {i.key: i.share for i in b.items}, rel=1e-6
        )


def test_a_filter_by_hand(lens):
    evidence = table([[0, 1]], [[2.0, 1.0]], [0.5], [-3.0], [[1.0, 0.0]])
    shares = source_shares(evidence, lens, "domain", where={"license": "CC0"})
    # Only prototype 0's 3/4 in law is CC0; medicine is of unknown licence.
    assert [(i.key, i.share) for i in shares.items] == [("law", pytest.approx(1.5 / 3.5))]
    assert shares.elsewhere == pytest.approx(1.5 / 3.5)
    assert shares.unattributed == pytest.approx(0.5 / 3.5)
    assert shares.to_dict()["where"] == {"license": ["CC0"]}
    none = source_shares(evidence, lens, "domain", where={"source": "s1", "domain": "medicine"})
    assert none.items == ()
    assert none.elsewhere == pytest.approx(3 / 3.5)
    assert document_shares(evidence, lens, where={"source": "s2"}) == []


@pytest.mark.parametrize("method", ["evidence", "source"])
@pytest.mark.parametrize("by", ["document", "source", "domain", "license"])
@given(seed=st.integers(0, 10_000))
def test_filtered_shares_sum_to_one(lens, method, by, seed):
    evidence = random_table(seed, 3)
    for where in ({"source": ["s1", "s2"]}, {"license": "(unknown)"}, {"domain": "law"}):
        shares = source_shares(evidence, lens, by, method=method, where=where)
        total = sum(i.share for i in shares.items) + shares.elsewhere + shares.unattributed
        assert total == pytest.approx(1, abs=1e-6)
    everything = source_shares(evidence, lens, by, method=method, where={"source": ["s1", "s2"]})
    assert everything.elsewhere == 0
    assert everything.items == source_shares(evidence, lens, by, method=method).items


@pytest.mark.parametrize(
    ("where", "words"),
    [({"sourc": "s1"}, "Did you mean 'source'"), ({"source": "s3"}, r"source=s3.*s1, s2")],
)
def test_filters_that_name_what_is_not_there(lens, where, words):
    evidence = table([[0]], [[1.0]], [0.0], [0.0], [[1.0, 0.0]])
    with pytest.raises(InputError, match=words):
        source_shares(evidence, lens, "source", where=where)


def test_an_unknown_method(lens):
    evidence = table([[0]], [[1.0]], [0.0], [0.0], [[1.0, 0.0]])
    with pytest.raises(InputError, match="Did you mean 'source'"):
        source_shares(evidence, lens, method="sources")
    with pytest.raises(InputError, match="activations"):
        source_shares(evidence, lens, method="source")
