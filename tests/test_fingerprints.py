"""Fingerprints of weights, those of quantised models among them."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from prismlm import fingerprints


def quantised(first, second):
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(TwoTensor(first, second))
    return model


def test_a_changed_weight_is_seen():
    model = nn.Linear(4, 3)
    before = fingerprints.of_model(model)
    assert fingerprints.of_model(model) == before
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert fingerprints.of_model(model) != before


def test_all_that_stands_in_place_of_a_weight_counts():
    one, other = torch.zeros(3, 4), torch.ones(3, 4)
    found = {fingerprints.of_model(quantised(*pair)) for pair in ((one, one), (one, other))}
    assert len(found | {fingerprints.of_model(quantised(other, one))}) == 3
    assert fingerprints.of_model(quantised(one, other)) in found


def test_half_a_pair_is_a_value_as_any_other():
    found = fingerprints.of_json({"name": "\ud800"})
    assert found != fingerprints.of_json({"name": "\udc00"})
    assert fingerprints.of_json({"b": "é", "a": 1}) == fingerprints.of_json({"a": 1, "b": "é"})
