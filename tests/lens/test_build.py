"""The index against a brute force that shares no code with it, over held-out text."""

import copy
import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from prismlm.corpus import build_corpus
from prismlm.corpus.windows import document_windows
from prismlm.errors import InputError, StaleLensError
from prismlm.lens import cells as cells_module
from prismlm.lens import layout, scan
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.lens import Lens
from prismlm.lens.options import training_corpus
from prismlm.lens.scan import drawn, states_of
from prismlm.lens.support import leave_one_out, measure_support, sample_excerpts
from prismlm.models.sidecar import weight_of
from prismlm.ops import prototype_head
from tests.helpers.lens_files import cells_and_tokens
from tests.helpers.token_corpus import excerpt

WINDOW, STRIDE, CONTEXTS = 128, 96, 6
OPTIONS = IndexOptions(contexts=CONTEXTS, window=WINDOW, stride=STRIDE, split="heldout")


@pytest.fixture(scope="module")
def corpus(lm):
    """Held-out text enough for windows and padding of every kind, to be indexed over and over."""
    return lm.lens.corpus


@pytest.fixture(scope="module")
def lens(lm, corpus, tmp_path_factory):
    return build_index(lm.model, lm.head, corpus, tmp_path_factory.mktemp("lens") / "all", OPTIONS)


def cells_of(lm, path):
    """Return the cells of a lens and all of their records."""
    cells = Lens.open(path, lm.model, lm.head).cells
    return cells, cells.records(np.arange(len(cells)))


class Read(NamedTuple):
    """A document, read one unpadded window at a time; its end predicts nothing."""

    number: int
    start: int
    ids: torch.Tensor  # [n]
    states: torch.Tensor  # [n − 1, d]
    unit: torch.Tensor  # in float64
    cosines: torch.Tensor  # with all prototypes, [n − 1, K]


@pytest.fixture(scope="module")
def documents(lm, corpus):
    with torch.no_grad():
        return [read_document(lm, corpus, number) for number in corpus.split("heldout").tolist()]


def read_document(lm, corpus, number):
    start, length = int(corpus.starts[number]), int(corpus.lengths[number])
    ids = torch.from_numpy(corpus.tokens(start, length).astype(np.int64))
    parts, done = [], 0
    for first in range(0, length, STRIDE):
        if done >= length:
            break
        window = ids[first : first + WINDOW]
        states = lm.model.model(input_ids=window[None]).last_hidden_state[0]
        parts.append(states[done - first :])
        done = first + len(window)
    states = torch.cat(parts)[:-1]
    unit = normalize(states.double(), dim=-1)
    return Read(number, start, ids, states, unit, unit @ normalize(lm.head.prototypes.double()).T)


def test_contexts_and_uses_equal_brute_force(lm, lens, corpus, documents):
    index = pq.read_table(lens / layout.INDEX_FILE).to_pylist()
    cosines = torch.stack([read.cosines.max(0).values for read in documents])
    assert len(index) == lm.head.num_prototypes * CONTEXTS
    assert len({(row["prototype"], row["doc_id"]) for row in index}) == len(index)
    for row in index:
        prototype = row["prototype"]
        order = cosines[:, prototype].sort(descending=True).values
        assert row["cosine"] == pytest.approx(order[row["rank"]].item(), abs=2e-6)
        document = corpus.document_at(row["position"])
        assert corpus.doc_ids[document] == row["doc_id"]
        # Two documents whose cosines differ by rounding alone may change places.
        ties = (cosines[:, prototype] - order[row["rank"]]).abs() < 2e-6
        assert document in {documents[d].number for d in ties.nonzero().flatten().tolist()}
        assert row["before"] + row["token"] + row["after"] in corpus.text(document)
        assert row["token"] == excerpt(corpus, row["position"], 1)
        assert row["source"] == corpus.column("source")[document]
    top = [read.cosines.topk(lm.head.prototypes_per_token, dim=1) for read in documents]
    used = torch.cat([each.indices[each.values > 0] for each in top])
    uses = used.bincount(minlength=lm.head.num_prototypes)
    tokens = layout.read_meta(lens).tokens
    usage = pq.read_table(lens / layout.PROTOTYPES_FILE)["usage"].to_numpy() * tokens
    # Float32 rounding may swap the k-th with the next prototype; one use in 20,000 at most.
    assert np.abs(usage - uses.numpy()).sum() <= uses.sum() / 20_000
    assert usage.sum() == pytest.approx(uses.sum().item())


@pytest.mark.parametrize(("changed", "least"), [({"bf16": True}, 0.99), ({"codes": "pq"}, 0.9)])
def test_states_in_bf16_or_pq_are_nearly_the_same(lm, corpus, lens, tmp_path, changed, least):
    built = build_index(lm.model, lm.head, corpus, tmp_path / "lens", replace(OPTIONS, **changed))
    precision = [layout.read_meta(path).precision for path in (lens, built)]
    assert precision == ["float32", "bf16" if "bf16" in changed else "float32"]
    states = [
        cells.codes.states(records)[np.argsort(records["position"])]
        for cells, records in (cells_of(lm, path) for path in (lens, built))
    ]
    assert not torch.equal(*states)
    assert torch.nn.functional.cosine_similarity(*states).min() > least


def test_other_directories_and_vocabularies_are_refused(lm, corpus, tmp_path):
    chapter = tmp_path / "thesis" / "chapter.txt"
    chapter.parent.mkdir()
    chapter.write_text("irreplaceable")
    with pytest.raises(InputError, match="not a lens"):
        build_index(lm.model, lm.head, corpus, chapter.parent, OPTIONS, overwrite=True)
    assert chapter.read_text() == "irreplaceable"
    documents = corpus.path.parent / "documents.parquet"
    other = build_corpus([documents], tmp_path / "other", vocab_size=3000)
    with pytest.raises(InputError, match="the model embeds"):
        build_index(lm.model, lm.head, other, tmp_path / "x", OPTIONS)


@torch.no_grad()
def test_every_position_is_in_the_cell_of_its_nearest_prototype(lm, lens, documents):
    cells, records = cells_of(lm, lens)
    cell, tokens = cells_and_tokens(cells)
    row_of = {position: row for row, position in enumerate(records["position"].tolist())}
    assert len(row_of) == len(cells) == sum(len(read.states) for read in documents)
    for _, start, ids, states, unit, cosines in documents:
        chances = lm.model.lm_head(states).softmax(-1).gather(1, ids[1:, None])[:, 0]
        rows = [row_of[start + offset] for offset in range(len(ids) - 1)]
        assert records["read"][rows].tolist() == ids[:-1].tolist()
        assert tokens[rows].tolist() == ids[1:].tolist()
        nearest = cosines.gather(1, torch.from_numpy(cell[rows])[:, None])[:, 0]
        # Where two prototypes are as near as rounding, either may be the nearest.
        np.testing.assert_allclose(nearest, cosines.max(1).values, atol=1e-6)
        np.testing.assert_allclose(records["probability"][rows], chances, atol=2e-3)
        coded = cells.codes.states(records[rows]).double()
        np.testing.assert_allclose((coded * unit).sum(1), 1, atol=3e-3)


@torch.no_grad()
def test_fitted_weights_count_the_prototypes_that_the_head_chose(
    lm, corpus, lens, documents, tmp_path, monkeypatch
):
    """Where positions lie is as it was; uses, activations and the scale of support are its own."""
    for module in (prototype_head, prototype_head.fitted):
        monkeypatch.setattr(module, "PICKS", 1)
    head = copy.deepcopy(lm.head)
    head.weights = "fitted"
    built = build_index(lm.model, head, corpus, tmp_path / "fitted", OPTIONS)
    changed = {layout.INDEX_FILE, layout.META_FILE, layout.PROTOTYPES_FILE}
    for name in {path.name for path in built.iterdir()} - changed:
        assert (built / name).read_bytes() == (lens / name).read_bytes(), name
    counts, chosen = torch.zeros(head.num_prototypes), {}
    for read in documents:
        routing = head(read.states).routing
        used = routing.activations > 0
        counts += routing.indices[used].bincount(minlength=len(counts))
        for place, row in enumerate(zip(routing.indices, routing.activations, strict=True)):
            chosen[read.start + place] = dict(zip(*(each.tolist() for each in row), strict=True))
    usage = pq.read_table(built / layout.PROTOTYPES_FILE)["usage"].to_numpy()
    np.testing.assert_allclose(usage * layout.read_meta(built).tokens, counts)
    for row in pq.read_table(built / layout.INDEX_FILE).to_pylist():
        activations = chosen[row["position"]]
        assert row["routed"] == (row["prototype"] in activations)
        assert row["activation"] == pytest.approx(activations.get(row["prototype"], 0), abs=1e-4)
    with pytest.raises(StaleLensError):
        Lens.open(built, lm.model, lm.head)


def test_a_share_of_the_windows_is_read(lm, corpus, lens, tmp_path, monkeypatch):
    """The model reads drawn windows alone; contexts, uses and cells come from them."""
    read = []
    monkeypatch.setattr(scan, "states_of", lambda *a, **k: read.append(a[1]) or states_of(*a, **k))
    some = build_index(
        lm.model, lm.head, corpus, tmp_path / "some", replace(OPTIONS, positions=0.3)
    )
    windows = corpus.split("heldout"), corpus.starts, corpus.lengths, WINDOW, STRIDE, corpus.prefix
    grid = document_windows(*windows)
    some_of = grid.take(drawn(grid.start, 0.3))
    assert 0.15 * len(grid) < len(some_of) < 0.45 * len(grid)
    starts = torch.cat([batch.positions[:, 0] for batch in read])
    assert sorted(starts.tolist()) == some_of.start.tolist()
    cells, records = cells_of(lm, some)
    spans = some_of.start + some_of.skip, some_of.start + some_of.length
    owned = np.concatenate([np.arange(*span) for span in zip(*spans, strict=True)])
    # The last token of a document predicts nothing.
    expected = np.setdiff1d(owned, np.append(corpus.starts, corpus.num_tokens) - 1)
    assert sorted(records["position"].tolist()) == expected.tolist()
    meta = layout.read_meta(some)
    assert (cells.meta.share, meta.tokens) == (0.3, len(expected))
    assert set(pq.read_table(some / layout.INDEX_FILE)["position"].to_pylist()) <= set(
        expected.tolist()
    )
    assert 0.01 < len(drawn(np.arange(10**5), 0.02).nonzero()[0]) / 10**5 < 0.03
    with pytest.raises(InputError, match=r"no window .* --positions 1e-07"):
        build_index(lm.model, lm.head, corpus, tmp_path / "none", replace(OPTIONS, positions=1e-7))


@torch.no_grad()
def test_nearest_positions_of_other_documents_equal_brute_force(lm, monkeypatch):
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 10**9)
    cells, head, corpus, weight = lm.lens.cells, lm.head, lm.lens.corpus, weight_of(lm.model)
    records, (cell, tokens) = cells.records(np.arange(len(cells))), cells_and_tokens(cells)
    document = int(corpus.split("train")[5])
    start, length = int(corpus.starts[document]) + 3, 12
    ids = torch.from_numpy(corpus.tokens(start, length).astype(np.int64))
    z = lm.model.model(input_ids=ids[None]).last_hidden_state[0]
    others = np.array([corpus.document_at(p) for p in records["position"].tolist()]) != document
    expected = []
    for state, target in zip(normalize(z[:-1]), ids[1:].tolist(), strict=True):
        routing = head.nearest(state[None])
        raised = head.prototypes[routing.indices[0]] @ (weight[target] - weight.mean(0)) > 0
        active = routing.indices[0][(routing.activations[0] > 0) & raised].tolist()
        matching = np.isin(cell, active) & (tokens == target) & others
        cosines = cells.codes.states(records[matching]) @ state
        expected.append(float(cosines.max()) if len(cosines) else -1.0)
    other = int(corpus.starts[corpus.split("train")[2]]), 7
    nearest = leave_one_out(cells, lm.model, head, corpus, [other, (start, length)])[6:]
    np.testing.assert_allclose(nearest, expected, atol=1e-5)
    assert nearest.max() > 0


def test_the_scale_of_a_lens_is_of_its_other_split(lm):
    scale, corpus = lm.lens.support, lm.lens.corpus
    assert measure_support(lm.lens.cells, lm.model, lm.head, corpus, "train") == scale
    assert scale.nearest == sorted(scale.nearest)
    assert -1 <= scale.median <= 1
    starts = [start for start, _ in sample_excerpts(corpus, "heldout")]
    assert starts
    assert {corpus.document_at(start) for start in starts} <= set(corpus.split("train").tolist())


def test_a_directory_that_does_not_say_its_corpus_or_says_otherwise(corpus, tmp_path):
    for recipe in (None, {"corpus": str(tmp_path / "gone")}, {"corpus": str(corpus.path)}):
        if recipe:
            run = {"recipe": recipe, "corpus": {"fingerprint": "x"}}
            (tmp_path / "training.json").write_text(json.dumps(run))
        with pytest.raises(InputError, match=r"is not there, or has changed.*--corpus"):
            training_corpus(tmp_path)
    # A head's own file comes before the run's.
    provenance = {"recipe": {"corpus": str(corpus.path)}, "corpus": {}}
    (tmp_path / "prismlm.json").write_text(json.dumps({"provenance": provenance}))
    assert training_corpus(tmp_path).name == corpus.name
