"""A head fitted to stored states: the sampled divergence, initialisation, and that it learns."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prismlm.corpus import Corpus
from prismlm.errors import DivergenceError, InputError
from prismlm.layers import PrototypeHead
from prismlm.lens.options import IndexOptions
from prismlm.lens.scan import read_states
from prismlm.progress import SILENT
from prismlm.training import fit as module
from prismlm.training.fit import (
    FitOptions,
    Fitting,
    Loop,
    batches,
    fit,
    init_prototypes,
    mean_divergence,
)
from prismlm.training.model import OutputMap, VocabularySample, divergence

SMALL = FitOptions(
    prototypes=32, prototypes_per_token=4, epochs=1, batch=64, frequent=100, drawn=50
)


@pytest.fixture(scope="module")
def states(lm, short_corpus, tmp_path_factory):
    directory, options = tmp_path_factory.mktemp("states"), IndexOptions(window=64, stride=48)
    return read_states(lm.model, Corpus.open(short_corpus), directory, options, limit_bytes=3e5)


def sampled_divergence(model, z, rebuilt, frequent, drawn):
    """The loss of a step, with the vocabulary sample of step 0."""
    output_map = OutputMap.from_model(model)
    counts = torch.ones(len(output_map.weight))
    tokens, log_weights = VocabularySample(counts, frequent, drawn).draw(0)
    return mean_divergence(z, rebuilt, output_map.restricted_to(tokens), log_weights)


def full_divergence(model, z, rebuilt):
    return sampled_divergence(model, z, rebuilt, 10**6, 0).item()


@pytest.mark.parametrize("biased", [False, True])
def test_products_in_bf16_change_the_divergence_and_its_gradient_little(monkeypatch, biased):
    monkeypatch.setattr(module, "MIN_BF16_STATES", 1)
    monkeypatch.setattr(module, "MIN_BF16_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)
    weight, z, change = (torch.randn(n, 32, generator=generator) for n in (400, 60, 60))
    model, embedding = torch.nn.Module(), torch.nn.Linear(32, 400, bias=biased)
    embedding.weight.data = weight
    if biased:
        embedding.bias.data = weight[:, 0]
    model.get_output_embeddings = lambda: embedding
    values, gradients = [], []
    for low in (True, False):
        monkeypatch.setattr(module, "has_fast_product", lambda low=low: low)
        rebuilt = (z + 0.2 * change).requires_grad_()
        actual = sampled_divergence(model, z, rebuilt, 100, 100)
        actual.backward()
        values.append(actual.item())
        gradients.append(rebuilt.grad.flatten())
        assert sampled_divergence(model, z, z, 100, 100).abs() < 1e-6
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], rel=0.01)
    assert F.cosine_similarity(*gradients, dim=0) > 0.9995
    tokens, log_weights = VocabularySample(torch.ones(400), 100, 100).draw(0)
    logits = [embedding(x)[:, tokens] + log_weights for x in (z, rebuilt)]
    assert values[1] == pytest.approx(divergence(*logits).mean().item(), rel=1e-4)


def test_every_epoch_sees_every_state_once_in_an_order_of_its_own():
    actual = list(batches(10, 3, 6, seed=0))
    epochs = [np.concatenate(actual[:3]), np.concatenate(actual[3:])]
    assert all(len(set(epoch.tolist())) == 9 for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_fit_learns_best_with_fitted_weights_and_is_the_same_again(lm, states):
    short = [fit(lm.model, states, replace(SMALL, epochs=0.3))[0].prototypes for _ in range(2)]
    assert torch.equal(*short)
    head, history = fit(lm.model, states, replace(SMALL, epochs=3))
    assert history[-1]["prototype_only_kl"] < 0.8 * history[0]["prototype_only_kl"]
    start = PrototypeHead(states.width, 32, 4)
    init_prototypes(start, states, seed=0)
    by_cosine, _ = fit(lm.model, states, replace(SMALL, epochs=3, weights="cosine"))
    z = states.states(np.arange(500))
    before, after, cosine = (
        full_divergence(lm.model, z, h(z).reconstruction) for h in (start, head, by_cosine)
    )
    assert after < 0.8 * before
    # Fitted weights predict better than cosines.
    assert head.weights == "fitted"
    assert after < cosine


def test_a_process_without_rows_of_a_step_adds_nothing(lm, states):
    head = SMALL.head(states.width)
    init_prototypes(head, states, 0)
    fitting = Fitting(lm.model, states, SMALL, head)
    fitting.share = 0.0
    assert [*fitting.losses(np.empty(0, np.int64)).values()] == [0.0] * 3
    assert head.prototypes.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prototypes": 0}, "FitOptions.prototypes is 0: expected above 0"),
        ({"seed": -1}, "seed is -1: expected from 0 on"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"prototypes": 4, "prototypes_per_token": 5}, "at most the number of prototypes, 4"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        FitOptions(**options)


@pytest.mark.parametrize(("states", "count"), [(42_231, 2_639), (10**6, 8_192), (600, 64)])
def test_a_small_corpus_has_fewer_prototypes(states, count):
    assert FitOptions().of_states(states).prototypes == count


def test_divergence_is_reported(lm, states):
    options = replace(SMALL, learning_rate=1e20, weights="cosine")
    with pytest.raises(DivergenceError, match="fit with a lower --rate"):
        fit(lm.model, states, options)


class OneWeight(Loop):
    """Notes the rate of each step; a gradient may be NaN in the last one."""

    what, remedy = "the fit", "fit with a lower --rate"

    def __init__(self, steps, last=0.1):
        super().__init__([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2}], steps)
        self.rates, self.last = [], last

    def losses(self, rows):
        (group,) = self._optimizer.param_groups
        self.rates.append(group["lr"])
        at_the_end = self.step == self.steps - 1
        group["params"][0].grad = torch.full((1,), self.last if at_the_end else 0.1)
        return {"loss": 1.0}


def test_weights_that_the_last_step_broke_are_not_returned():
    with pytest.raises(DivergenceError, match="some weights are not finite: fit with a lower"):
        OneWeight(3, math.nan).run([np.arange(1)] * 3, "Fitting", "loss", SILENT)


def test_the_rate_rises_over_a_twentieth_of_the_steps_and_falls_as_a_cosine():
    loop = OneWeight(40)
    loop.run([np.arange(1)] * 40, "Fitting", "loss", SILENT)
    assert loop.rates[:3] == pytest.approx([0.1, 0.2, 0.2])
    # Half way down after 2 + 19 of 40 steps.
    assert loop.rates[21] == pytest.approx(0.1)
    assert loop.rates[-1] == pytest.approx(0.1 * (1 + math.cos(math.pi * 37 / 38)))
