"""A head fitted to stored states: the sampled divergence, placing, resuming, and that it learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import DivergenceError, InputError
from prismlm.layers import PrototypeHead
from prismlm.lens.options import IndexOptions
from prismlm.lens.states import read_states
from prismlm.progress import SILENT
from prismlm.training import fit as module
from prismlm.training.fit import FitOptions, Vocabulary, fit, place
from prismlm.training.loop import Loop, batches
from prismlm.training.losses import divergence

SMALL = FitOptions(
    prototypes=32, prototypes_per_token=4, epochs=1, batch=64, frequent=100, drawn=50
)


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


@pytest.fixture(scope="module")
def states(lm, short_corpus, tmp_path_factory):
    return read_states(
        lm.model,
        Corpus.open(short_corpus),
        tmp_path_factory.mktemp("states"),
        IndexOptions(window=64, stride=48),
        limit_bytes=1e6,
    )


@pytest.fixture(scope="module")
def fitted(lm, states):
    """A head of three epochs, and its history."""
    return fit(lm.model, states, replace(SMALL, epochs=3))


def test_over_the_whole_vocabulary_the_divergence_is_the_plain_one(lm, states):
    size = lm.model.get_output_embeddings().weight.shape[0]
    z = states.states(np.arange(40))
    rebuilt = z + torch.randn(z.shape, generator=torch.Generator().manual_seed(0)) * z.std()
    logits = [F.linear(x, lm.model.get_output_embeddings().weight.float()) for x in (z, rebuilt)]
    expected = divergence(*logits).mean().item()
    for frequent in (0, 100, size):
        vocabulary = Vocabulary(lm.model, states.tokens(), frequent, size)
        tokens, counted = vocabulary.draw(0)
        assert sorted(tokens.tolist()) == list(range(size))
        found = vocabulary.divergence(z, rebuilt, tokens, counted).item()
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_products_in_bf16_change_the_divergence_and_its_gradient_little(monkeypatch, biased):
    monkeypatch.setattr(module, "LEAST_STATES", 1)
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)
    weight, z, change = (torch.randn(n, 32, generator=generator) for n in (400, 60, 60))
    model = prismlm_like(weight, bias=weight[:, 0] if biased else None)
    vocabulary = Vocabulary(model, torch.arange(9), frequent=100, drawn=100)
    tokens = vocabulary.draw(0)
    values, gradients = [], []
    for low in (True, False):
        monkeypatch.setattr(module, "has_fast_product", lambda low=low: low)
        rebuilt = (z + 0.2 * change).requires_grad_()
        found = vocabulary.divergence(z, rebuilt, *tokens)
        found.backward()
        values.append(found.item())
        gradients.append(rebuilt.grad.flatten())
        assert vocabulary.divergence(z, z, *tokens) == 0
    assert values[0] != values[1]
    assert values[0] == pytest.approx(values[1], rel=0.01)
    assert F.cosine_similarity(*gradients, dim=0) > 0.9995
    # As it is without the detour by a difference.
    bias = weight[tokens[0], 0] * biased + tokens[1]
    logits = [F.linear(x, weight[tokens[0]], bias) for x in (z, rebuilt)]
    assert values[1] == pytest.approx(divergence(*logits).mean().item(), rel=1e-4)


def prismlm_like(weight, bias=None):
    """Return the least that has an output embedding."""
    model = torch.nn.Module()
    embedding = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    embedding.weight.data = weight
    if bias is not None:
        embedding.bias.data = bias
    model.get_output_embeddings = lambda: embedding
    return model


def test_every_epoch_sees_every_state_once_in_an_order_of_its_own():
    found = list(batches(10, 3, 6, seed=0))
    epochs = [np.concatenate(found[:3]), np.concatenate(found[3:])]
    assert all(len(set(epoch.tolist())) == 9 for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_prototypes_are_placed_on_directions_of_states(states):
    head = PrototypeHead(states.width, 32, 4)
    place(head, states, seed=0)
    z = states.states(np.arange(len(states)))
    nearest = F.cosine_similarity(z[:200, None], head.prototypes[None], dim=-1).max(-1).values
    assert nearest.mean() > 0.5
    norms = head.prototypes.norm(dim=-1) * 4
    assert norms.mean().item() == pytest.approx(z.norm(dim=-1).mean().item(), rel=0.1)


def test_a_fit_learns_and_is_the_same_again(lm, states, fitted):
    head, history = fitted
    again, _ = fit(lm.model, states, replace(SMALL, epochs=3))
    assert torch.equal(head.prototypes, again.prototypes)
    assert history[-1]["prototype_only_kl"] < 0.8 * history[0]["prototype_only_kl"]
    z = states.states(np.arange(500))
    placed = PrototypeHead(states.width, 32, 4)
    place(placed, states, seed=0)
    vocabulary = Vocabulary(lm.model, states.tokens(), 10**6, 0)
    tokens = vocabulary.draw(0)
    before, after = (
        vocabulary.divergence(z, one(z).reconstruction, *tokens).item() for one in (placed, head)
    )
    assert after < 0.8 * before


def test_fitted_weights_predict_better(lm, states, fitted):
    head, history = fitted
    assert head.weights == "fitted"
    assert history[-1]["prototype_only_kl"] < history[0]["prototype_only_kl"]
    other, _ = fit(lm.model, states, replace(SMALL, epochs=3, weights="cosine"))
    z = states.states(np.arange(500))
    vocabulary = Vocabulary(lm.model, states.tokens(), 10**6, 0)
    tokens = vocabulary.draw(0)
    by_fit, by_cosine = (
        vocabulary.divergence(z, one(z).reconstruction, *tokens).item() for one in (head, other)
    )
    assert by_fit < by_cosine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prototypes": 0}, "prototypes is 0: expected a whole number from 1 on"),
        ({"batch": 2.5}, r"batch is 2\.5: expected a whole number from 1 on"),
        ({"drawn": 0.5}, r"drawn is 0\.5: expected a whole number from 0 on"),
        ({"seed": -1}, "seed is -1: expected a whole number from 0 on"),
        ({"prototypes": 4, "prototypes_per_token": 5}, "more than the 4 prototypes"),
        ({"epochs": math.nan}, "epochs is nan"),
        ({"learning_rate": -1}, "expected a positive number"),
        ({"frequent": 0, "drawn": 0}, "needs some tokens"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        FitOptions(**given)


@pytest.mark.parametrize(
    ("given", "states", "count"),
    [(None, 42_231, 2_639), (None, 10**6, 8_192), (None, 600, 64), (512, 600, 512)],
)
def test_a_small_corpus_has_fewer_prototypes(given, states, count):
    assert FitOptions(prototypes=given).of_states(states).prototypes == count


# Fitted weights undo the length of prototypes, up to what float32 holds.
@pytest.mark.parametrize(("weights", "rate"), [("cosine", 1e20), ("fitted", 1e38)])
def test_a_rate_that_no_fit_bears_is_told(lm, states, weights, rate):
    options = replace(SMALL, learning_rate=rate, weights=weights)
    with pytest.raises(DivergenceError, match="fit with a lower --rate"):
        fit(lm.model, states, options)


class BrokenAtTheEnd(Loop):
    """One weight, whose last gradient is no number while every loss is one."""

    what, remedy = "the fit", "fit with a lower --rate"

    def losses(self, rows):
        (group,) = self._optimizer.param_groups
        group["params"][0].grad = torch.full((1,), math.nan if self.step == 2 else 0.1)
        return {"loss": 1.0}


class Rates(Loop):
    """One weight; notes the rate of each step."""

    what, remedy = "the fit", "fit with a lower --rate"

    def losses(self, rows):
        self.noted = [*getattr(self, "noted", []), self._optimizer.param_groups[0]["lr"]]
        return {"loss": 1.0}


def test_the_rate_rises_over_a_twentieth_of_the_steps_and_falls_as_a_cosine():
    loop = Rates([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2}], 40)
    loop.run([np.arange(1)] * 40, "Fitting", "loss", SILENT)
    assert loop.noted[:3] == pytest.approx([0.1, 0.2, 0.2])
    # Half way down after 2 + 19 of 40 steps.
    assert loop.noted[21] == pytest.approx(0.1)
    assert loop.noted[-1] == pytest.approx(0.1 * (1 + math.cos(math.pi * 37 / 38)))


def test_weights_that_the_last_step_broke_are_not_returned():
    loop = BrokenAtTheEnd([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1}], 3)
    with pytest.raises(DivergenceError, match="ends with what is not finite: fit with a lower"):
        loop.run([np.arange(1)] * 3, "Fitting", "loss", SILENT)
