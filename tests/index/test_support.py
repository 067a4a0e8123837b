"""The scale of support against brute force, and by hand."""

import numpy as np
import pytest
import torch

import prismlm
from prismlm.index import neighbours
from prismlm.index.support import SupportScale, leave_one_out, measure_support
from prismlm.models.sidecar import weight_of


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_nearest_positions_of_other_documents_equal_brute_force(lm, monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_OF_A_RANGE", 10**9)
    cells, head, weight = lm.lens.cells, lm.head, weight_of(lm.model).detach()
    every = np.arange(len(cells))
    records, tokens = cells.records(every), cells.tokens(every)
    cell = (
        np.searchsorted(np.append(np.asarray(cells._starts), len(cells)), every, side="right") - 1
    )
    cell = np.asarray(cells._keys)[cell] // cells.meta.vocabulary
    states = torch.nn.functional.normalize(cells.states(records), dim=-1)
    document = cells.document_of(records["position"])
    rows = np.linspace(0, len(cells) - 1, 25).astype(int)
    expected = []
    for row in rows.tolist():
        routing = head.nearest(states[row][None])
        signature = weight[tokens[row]] - weight.mean(0)
        speaks = head.prototypes.detach()[routing.indices[0]] @ signature
        used = routing.indices[0][(routing.activations[0] > 0) & (speaks > 0)].tolist()
        there = np.isin(cell, used) & (tokens == tokens[row]) & (document != document[row])
        cosines = cells.states(records[there]) @ states[row]
        expected.append(float(cosines.max()) if len(cosines) else -1.0)
    found = leave_one_out(cells, head, weight, rows)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.max() > 0


def test_scores_and_bounds_by_hand():
    scale = SupportScale([-1.0, 0.5, 0.7, 0.9], [1, 4], [0.2, 0.4], [0.8, 0.6], 100)
    # (rank − ½) / 4, at least 0
    np.testing.assert_allclose(
        scale.score(np.array([-2.0, -1.0, 0.6, 0.9])), [0, 0.125, 0.375, 0.875]
    )
    assert scale.bounds(1) == (0.2, 0.8)
    assert scale.bounds(2) == pytest.approx((0.3, 0.7))  # halfway between 1 and 4 in logarithms
    assert scale.bounds(1000) == (0.4, 0.6)


def test_text_that_was_left_out_scores_a_half(lm):
    scale = lm.lens.support
    assert scale is not None
    again = measure_support(lm.lens.cells, lm.head, weight_of(lm.model).detach())
    assert again == scale
    low, high = scale.bounds(1)
    assert 0 <= low < 0.5 < high <= 1
    widths = [high - low for low, high in zip(scale.low, scale.high, strict=True)]
    assert widths[-1] < widths[0]
