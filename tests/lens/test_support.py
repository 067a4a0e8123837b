"""The scale of support against brute force, and by hand."""

import numpy as np
import torch

from prismlm.lens import cells as cells_module
from prismlm.lens.support import SupportScale, leave_one_out, measure_support, sample_excerpts
from prismlm.models.sidecar import weight_of
from tests.helpers.next_tokens import next_tokens


def test_nearest_positions_of_other_documents_equal_brute_force(lm, monkeypatch):
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 10**9)
    cells, head, corpus = lm.lens.cells, lm.head, lm.lens.corpus
    weight = weight_of(lm.model).detach()
    every = np.arange(len(cells))
    records, tokens = cells.records(every), next_tokens(cells, every)
    bounds = np.append(np.asarray(cells.keys_and_starts[1]), len(cells))
    cell = np.repeat(np.asarray(cells.keys_and_starts[0]), np.diff(bounds)) // cells.meta.vocabulary
    own = int(corpus.split("train")[5])
    start, length = int(corpus.starts[own]) + 3, 12
    ids = torch.from_numpy(corpus.tokens(start, length).astype(np.int64))
    z = lm.model.model(input_ids=ids[None]).last_hidden_state[0].detach()
    others = np.array([corpus.document_at(p) for p in records["position"].tolist()]) != own
    expected = []
    for state, target in zip(torch.nn.functional.normalize(z[:-1]), ids[1:].tolist(), strict=True):
        routing = head.nearest(state[None])
        signature = weight[target] - weight.mean(0)
        speaks = head.prototypes.detach()[routing.indices[0]] @ signature
        used = routing.indices[0][(routing.activations[0] > 0) & (speaks > 0)].tolist()
        there = np.isin(cell, used) & (tokens == target) & others
        cosines = cells.codes.states(records[there]) @ state
        expected.append(float(cosines.max()) if len(cosines) else -1.0)
    other = int(corpus.starts[corpus.split("train")[2]]), 7
    _, found = leave_one_out(cells, lm.model, head, corpus, [other, (start, length)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.max() > 0


def test_scores_by_hand():
    scale = SupportScale([-1.0, 0.5, 0.7, 0.9], 100)
    # (rank − ½) / 4, at least 0
    scores = scale.score(np.array([-2.0, -1.0, 0.6, 0.9]))
    np.testing.assert_allclose(scores, [0, 0.125, 0.375, 0.875])
    assert SupportScale([-1.0, 0.5, 0.9], 100).median == 0.5


def test_the_scale_is_of_what_unseen_text_finds(lm):
    scale = lm.lens.support
    assert scale is not None
    assert measure_support(lm.lens.cells, lm.model, lm.head, lm.lens.corpus, "train") == scale
    assert scale.nearest == sorted(scale.nearest)
    assert -1 <= scale.median <= 1


def test_the_scale_is_measured_on_the_other_split(lm):
    corpus = lm.lens.corpus
    starts = [start for start, _ in sample_excerpts(corpus, "heldout")]
    assert starts
    assert {corpus.document_at(start) for start in starts} <= set(corpus.split("train").tolist())
