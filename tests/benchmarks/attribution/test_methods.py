"""Methods on made-up positions, against sums written out."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.attribution.methods.baselines import ByWords, NearestStates, SameToken
from benchmarks.attribution.methods.evidence import Choices, EvidenceByPosition
from benchmarks.attribution.methods.gradients import LastLayerKFAC
from benchmarks.attribution.methods.setting import Asked, Positions, Rows

PASSAGES, TOKENS, CELLS, WIDTH, COUNT = 5, 4, 3, 6, 40


class Setting(SimpleNamespace):
    def weight(self):
        return self.W

    def ask(self, predictions):
        return self.asked


@pytest.fixture
def setting():
    generator = np.random.default_rng(0)
    state = generator.normal(size=(COUNT, WIDTH))
    size = np.linalg.norm(state, axis=1).astype(np.float32)
    unit = (state / size[:, None]).astype(np.float16)
    W = generator.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    logits = unit.astype(np.float64) * size[:, None] @ W.T
    total = np.log(np.exp(logits).sum(1))
    token = generator.integers(0, TOKENS, COUNT).astype(np.int32)
    positions = Positions(
        np.sort(generator.integers(0, PASSAGES, COUNT)).astype(np.int32),
        token,
        generator.integers(0, TOKENS, COUNT).astype(np.int32),
        np.exp(logits[np.arange(COUNT), token] - total).astype(np.float32),
        total.astype(np.float32),
        generator.integers(0, CELLS, COUNT).astype(np.int32),
        size,
        unit,
    )
    states = generator.normal(size=(1, WIDTH))
    length = np.linalg.norm(states, axis=1)
    asked = Asked(
        (states / length[:, None]).astype(np.float32),
        length.astype(np.float32),
        np.array([2]),
        np.array([1]),
        np.array([0.3], dtype=np.float32),
        np.array([[1, 0, 2]]),
        np.array([[0.5, 2.0, -1.0]], dtype=np.float32),
    )
    return Setting(positions=positions, bank=range(PASSAGES), asked=asked, W=torch.from_numpy(W))


def by_loop(setting, weigh, cells=(0, 1)):
    """Sum over the positions of these cells what ``weigh`` gives for each."""
    p, z = setting.positions, setting.asked.states[0]
    scores = np.zeros(PASSAGES)
    for n in range(COUNT):
        if p.cell[n] in cells:
            scores[p.passage[n]] += weigh(n, float(p.state[n].astype(np.float32) @ z))
    return scores


def kernel(setting, n, cosine):
    return (setting.positions.token[n] == 2) * math.exp((cosine - 1) / 0.3)


def signed(setting, n, cosine):
    p = setting.positions
    logits = setting.W.numpy() @ p.state[n].astype(np.float32) * p.size[n]
    probability = np.exp(logits[2]) / np.exp(logits).sum()
    return ((p.token[n] == 2) - probability) * math.exp((cosine - 1) / 0.3)


@pytest.mark.parametrize(
    ("choices", "weigh", "cells"),
    [
        ({}, kernel, (0, 1)),
        # The first cell alone is that of the prototype with the most evidence.
        ({"cells": 1}, kernel, (0,)),
        ({"cells": None}, kernel, (0, 1, 2)),
        ({"signed": True}, signed, (0, 1)),
    ],
)
def test_evidence_is_a_kernel_over_positions(setting, choices, weigh, cells):
    found = EvidenceByPosition(setting, Choices(0.3, **choices))([None])[0]
    expected = by_loop(setting, lambda n, cosine: weigh(setting, n, cosine), cells)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_nearest_states_are_the_largest_cosine_of_each_passage(setting):
    p, z = setting.positions, setting.asked.states[0]
    cosines = p.state.astype(np.float32) @ z
    for same in (False, True):
        found = NearestStates(setting, same_token=same)([None])[0]
        for passage in range(PASSAGES):
            rows = (p.passage == passage) & ((p.token == 2) | (not same))
            least = 0 if same else -1
            assert found[passage] == pytest.approx(max([least, *cosines[rows]]), abs=1e-5)


def test_words_are_those_of_the_text_and_of_the_predicted_token():
    texts = ["tin of velmora", "iron of velmora", "silver"]
    names = ["tin", "iron", "velmora", "silver"]
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(names[i] for i in ids))
    bank = Bank(texts)
    bank.corpus = SimpleNamespace(tokenizer=tokenizer)
    asked = SimpleNamespace(ids=np.array([0, 2]), target=1)
    whole, last = ByWords(bank)([asked])[0], ByWords(bank, last=1)([asked])[0]
    assert whole[0] == whole[1] > whole[2] == 0
    assert last[1] > last[0] > last[2]


class Bank(list):
    def text(self, passage):
        return self[passage]


def test_a_passage_with_the_token_comes_before_one_without(setting):
    p = setting.positions
    asked = SimpleNamespace(target=2)
    count = np.bincount(p.passage[p.token == 2], minlength=PASSAGES)
    assert SameToken(setting, counted=True)([asked])[0].tolist() == count.tolist()
    drawn = SameToken(setting, counted=False)([asked])[0]
    assert ((drawn > 0) == (count > 0)).all()


def test_last_layer_influence_is_that_of_whole_matrices(setting):
    p, W = setting.positions, setting.W.numpy().astype(np.float64)
    z = p.state.astype(np.float64) * p.size[:, None]
    probability = np.exp(z @ W.T - p.log_total[:, None])
    outer = np.diag(probability.mean(0)) - probability.T @ probability / COUNT
    method = LastLayerKFAC(setting, damping=0.1, sampled=COUNT)
    # The inner moment is of unit states, times the mean square of their lengths.
    unit = p.state.astype(np.float64)
    inner = unit.T @ unit / COUNT * (p.size.astype(np.float64) ** 2).mean()
    damped = [m + 0.1 * np.diag(m).mean() * np.eye(len(m)) for m in (inner, outer)]
    query = setting.asked.states[0].astype(np.float64) * setting.asked.size[0]
    expected = np.exp(W @ query) / np.exp(W @ query).sum() - np.eye(TOKENS)[2]
    gradient = np.linalg.inv(damped[1]) @ np.outer(expected, query) @ np.linalg.inv(damped[0])
    scores = np.zeros(PASSAGES)
    for n in range(COUNT):
        own = np.outer(probability[n] - np.eye(TOKENS)[p.token[n]], z[n])
        scores[p.passage[n]] += (gradient * own).sum()
    np.testing.assert_allclose(method([None])[0], scores, rtol=2e-3, atol=1e-3)


def test_rows_are_found_by_their_value():
    rows = Rows.of(np.array([2, 0, 2, 5]))
    assert rows[2].tolist() == [0, 2]
    assert rows[5].tolist() == [3]
    assert rows[1].tolist() == rows[6].tolist() == rows[-1].tolist() == []
