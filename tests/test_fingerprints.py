"""Fingerprints of weights, those of quantised models among them."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from prismlm import fingerprints


def quantised(first, second):
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(TwoTensor(first, second))
    return model


def test_every_weight_counts_also_of_quantised_models():
    model = nn.Linear(4, 3)
    before = fingerprints.of_model(model)
    assert fingerprints.of_model(model) == before
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert fingerprints.of_model(model) != before
    zeros, ones = torch.zeros(3, 4), torch.ones(3, 4)
    pairs = (zeros, zeros), (zeros, ones), (ones, zeros), (zeros, ones)
    assert len({fingerprints.of_model(quantised(*pair)) for pair in pairs}) == 3


def test_json_with_lone_surrogates_in_any_order():
    surrogates = [fingerprints.of_json({"name": name}) for name in ("\ud800", "\udc00")]
    assert surrogates[0] != surrogates[1]
    assert fingerprints.of_json({"b": "é", "a": 1}) == fingerprints.of_json({"a": 1, "b": "é"})
