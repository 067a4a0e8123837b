"""Figures of a head: the same from a model's passes and from its stored states, by hand once."""

import math

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.explain.prediction import OutputLayer
from prismlm.explain.quality import measure_quality, quality_of
from prismlm.layers import PrototypeHead
from prismlm.lens.options import IndexOptions
from prismlm.lens.scan import read_states
from prismlm.models.seam import LogitMap
from prismlm.training.evaluation import HeldOut


def identity():
    """Return the least that has an output embedding: of two tokens, W the identity."""
    model, embedding = torch.nn.Module(), torch.nn.Linear(2, 2, bias=False)
    embedding.weight.data = torch.eye(2)
    model.get_output_embeddings = lambda: embedding
    return model


def measure_states(model, head, states):
    """Return the figures of stored states and their next tokens."""
    output = OutputLayer.from_model(model, LogitMap())
    return quality_of(output, head, ((z, output.logits(z), tokens) for z, tokens in states))


def test_figures_by_hand():
    # One prototype along the first axis, τ = 1: ẑ = cos(z, p) p.
    head = PrototypeHead(2, 1, 1)
    head.prototypes.data = torch.tensor([[2.0, 0.0]])
    z = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = measure_states(identity(), head, [(z, torch.tensor([1, 0]))])
    # cos = 0.6 and 1, so ẑ = (1.2, 0) and (2, 0); the mean state is (2, 2): even odds.
    ce = (math.log(1 + 1 / math.e) + math.log(1 + 1 / math.e)) / 2
    own = (math.log(1 + math.exp(1.2)) + math.log(1 + math.exp(-2))) / 2
    assert found.ce == pytest.approx(ce, rel=1e-6)
    assert found.prototype_only_ce == pytest.approx(own, rel=1e-6)
    assert found.mean_state_ce == pytest.approx(math.log(2), rel=1e-6)
    assert found.recovered == pytest.approx((math.log(2) - own) / (math.log(2) - ce), rel=1e-5)
    residual = (3 - 1.2) ** 2 + 4**2 + (1 - 2) ** 2
    assert found.fvu == pytest.approx(residual / (1 + 4 + 1 + 4), rel=1e-6)
    # The model prefers the second token, then the first; ẑ alone the first twice.
    assert found.agreement == 0.5
    # With the targets exchanged the model does worse than its mean state: nothing to recover.
    worse = measure_states(identity(), head, [(z, torch.tensor([0, 1]))])
    assert worse.ce == pytest.approx(math.log(1 + math.e), rel=1e-6)
    assert worse.recovered is None


def test_stored_states_give_the_figures_of_the_passes(tiny_model, tiny_corpus, tmp_path):
    lm, corpus = prismlm.load(tiny_model), Corpus.open(tiny_corpus)
    options = IndexOptions(window=64, stride=32, split="heldout")
    kept = read_states(lm.model, corpus, tmp_path, options, limit_bytes=1e9)
    passes = HeldOut(corpus, 64, 0).batches(10**9)
    rows = np.array_split(np.arange(len(kept)), 7)
    stored = measure_states(lm.model, lm.head, ((kept.states(r), kept.tokens(r)) for r in rows))
    run = measure_quality(lm.model, lm.head, LogitMap.of(lm.model), passes)
    # The last position of a window has its target outside of it, so passes leave it out.
    assert 0.95 < run.tokens / stored.tokens <= 1
    for name in ("ce", "prototype_only_ce", "mean_state_ce", "fvu", "explained_share", "recovered"):
        assert getattr(stored, name) == pytest.approx(getattr(run, name), rel=0.02)
    assert 0 < stored.recovered <= 1
