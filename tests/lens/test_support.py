"""The scale of support against brute force, and by hand."""

import numpy as np
import torch

from prismlm.lens import cells as cells_module
from prismlm.lens.support import leave_one_out, measure_support, sample_excerpts
from prismlm.models.sidecar import weight_of
from tests.helpers.lens_files import next_tokens


@torch.no_grad()
def test_nearest_positions_of_other_documents_equal_brute_force(lm, monkeypatch):
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 10**9)
    cells, head, corpus, weight = lm.lens.cells, lm.head, lm.lens.corpus, weight_of(lm.model)
    rows = np.arange(len(cells))
    records, tokens = cells.records(rows), next_tokens(cells, rows)
    keys, starts = cells.keys_and_starts
    cell = np.repeat(keys, np.diff(np.append(starts, len(cells)))) // cells.meta.vocabulary
    document = int(corpus.split("train")[5])
    start, length = int(corpus.starts[document]) + 3, 12
    ids = torch.from_numpy(corpus.tokens(start, length).astype(np.int64))
    z = lm.model.model(input_ids=ids[None]).last_hidden_state[0]
    others = np.array([corpus.document_at(p) for p in records["position"].tolist()]) != document
    expected = []
    for state, target in zip(torch.nn.functional.normalize(z[:-1]), ids[1:].tolist(), strict=True):
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
