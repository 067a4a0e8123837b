"""Coding rates and cross terms by their formulas; losses by length against the model's own loss."""

import math

import numpy as np
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.ops.signal_noise_attention import attention_weights
from prismlm.probes.heads import spectra
from prismlm.probes.heads.attention import head_uses
from tests.helpers.small_models import (
    attach_drawn,
    make_batch,
    make_gpt2,
    make_signal_noise,
    random_rows,
)


def test_hand_computed():
    # One point of norm 5 in two dimensions: ½ log(1 + 2 · 25 / 0.25).
    point = torch.tensor([[3.0, 4.0]])
    assert spectra.coding_rate(point).item() == pytest.approx(math.log(201) / 2)
    assert spectra.coding_rate(point, distortion=5.0).item() == pytest.approx(math.log(3) / 2)
    # Two orthogonal points: two directions of ½ log(1 + 2/2 · 4 / 1) each.
    points = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert spectra.coding_rate(points, distortion=1.0).item() == pytest.approx(math.log(5))


ROWS = random_rows(30, 18, 25)


def states_of(model):
    return spectra.read_states(model, [make_batch(*ROWS)])


def test_positions_are_a_seeded_sample_of_all():
    model = make_signal_noise()
    parts = [make_batch(row) for row in ROWS]
    every = spectra.read_states(model, parts)
    assert len(every[0].inputs) == 73
    samples = [spectra.read_states(model, parts, positions=20, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(samples[0][0].inputs, samples[1][0].inputs)
    assert not torch.equal(samples[0][0].inputs, samples[2][0].inputs)
    # The same positions of every layer, in reading order, and of each part of the text.
    rows = [(every[1].inputs == z).all(1).nonzero().item() for z in samples[0][1].inputs]
    assert rows == sorted(set(rows))
    assert rows[0] < 30 <= rows[-1]
    for states, layer in zip(samples[0], every, strict=True):
        assert torch.equal(states.inputs, layer.inputs[rows])
        assert torch.equal(states.steps, layer.steps[rows])


def test_rates_are_their_formulas():
    states = states_of(make_signal_noise())
    for state, row in zip(states, spectra.layer_rates(states).rows, strict=True):
        z, steps = state.inputs.double(), state.steps.double()
        u = state.attention.projection.weight.double().unflatten(0, (8, 4)).mT

        def direct(z, width):
            inner = torch.eye(len(z)).double() + width / (len(z) * 0.5**2) * z @ z.T
            return float(torch.linalg.slogdet(inner).logabsdet / 2)

        def rates(points, u=u, weight=row["noise_weight"]):
            signal, noise = (sum(direct(points @ head, 4) for head in part) for part in u.chunk(2))
            return [direct(points, 16), signal, noise, signal - weight * noise]

        after, end = z + steps, row["after"]["difference"]
        assert list(row["before"].values()) == pytest.approx(rates(z), rel=1e-6)
        assert list(row["after"].values()) == pytest.approx(rates(after), rel=1e-6)
        assert row["gain"] == end - row["before"]["difference"]
        scaled = rates(z * (after.norm() / z.norm()))[-1]
        assert row["gain_over_scaled"] == pytest.approx(end - scaled, rel=1e-6)
        order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
        shuffled = rates(z + steps[order])[-1]
        assert row["gain_over_shuffled"] == pytest.approx(end - shuffled, rel=1e-6)
        assert row["step_size"] == pytest.approx(float(steps.norm() / z.norm()))
        s, n = (torch.cat(list(part), 1) for part in u.chunk(2))
        own = float((s.T @ n).norm() / (s.norm() * n.norm()))
        random = pytest.approx(1 / 4, rel=0.15)
        assert row["incoherence"] == {"own": pytest.approx(own), "random": random}
        assert row["positions"] == 73


def test_the_gradient_is_that_of_finite_differences():
    state = states_of(make_signal_noise())[0]
    (row,) = spectra.layer_rates([state]).rows
    z, steps, size = state.inputs.double(), state.steps.double(), 1e-5

    def difference(points):
        return spectra.rates_of(points, state.dictionary.double(), state.noise_weight)["difference"]

    slope = (difference(z + size * steps) - difference(z - size * steps)) / (2 * size)
    (exact,) = torch.autograd.grad(difference(z.requires_grad_()), z)
    cosine = float(slope / (exact.norm() * steps.norm()))
    assert row["gradient_cosine"] == pytest.approx(cosine, rel=1e-4)


def test_what_cannot_be_read_is_refused():
    model = make_signal_noise()
    with pytest.raises(InputError, match="'gpt2' has no signal and noise dictionaries"):
        spectra.read_states(make_gpt2(), [make_batch(*ROWS)])
    model.model.layers[1].attention.projection.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        spectra.layer_rates(states_of(model)[1:])


@pytest.mark.parametrize("passes", [0, 2])
def test_states_and_heads_are_those_of_the_whole_model(passes):
    """Without uncertainty feedback, and with it."""
    (tokens,) = random_rows(30)
    model, batches = make_signal_noise(), [make_batch(tokens)]
    plain, plain_uses = spectra.read_states(model, batches), head_uses(model, batches)
    if passes:
        attach_drawn(model, 64, deviation=3.0, passes=passes)
    state, uses = spectra.read_states(model, batches)[1], head_uses(model, batches)
    layer = model.model.layers[1].attention
    calls = []
    handle = layer.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    model(torch.tensor([tokens]), use_cache=False)
    handle.remove()
    # Earlier passes give the codes.
    inputs, output = calls[-1]
    assert (state.layer, state.attention) == (1, layer)
    assert state.noise_weight == pytest.approx(0.1)
    assert torch.allclose(state.inputs, inputs[0], atol=1e-5)
    assert torch.allclose(state.steps, output.output[0], atol=1e-5)
    assert torch.allclose(state.projections().float(), output.projections[0], atol=1e-5)
    groups = output.projections.split(layer.heads, 1)
    weights = attention_weights(*groups, frequencies=layer.frequencies, scale=layer.scale)
    expected = weights[0].diagonal(0, 1, 2)[:, 15:].mean(1)
    shares = [use["self_share"] for use in uses.rows if use["layer"] == 1]
    assert shares == pytest.approx(expected.tolist(), abs=1e-5)
    assert uses["queries"] == 30 - 16 + 1
    if passes:
        assert (state.inputs - plain[1].inputs).abs().max() > 0.5
        assert uses.rows != plain_uses.rows


def test_cross_terms_are_means_of_double_sums():
    states = states_of(make_signal_noise())
    table, tau = spectra.cross_terms(states, length=50), torch.arange(50).double()[:, None]
    for state, terms in zip(states, table.rows, strict=True):
        groups = torch.hypot(*state.projections().chunk(2, -1)).chunk(2)
        frequencies = state.attention.frequencies
        k = {}
        for name, i, j in (("signal_noise", 0, 1), ("signal_signal", 0, 0), ("noise_noise", 1, 1)):
            u, v = groups[i], groups[j]
            # E over two independent positions a and b of C_uj C_vk, and over τ.
            content = torch.einsum("gaj,gbj,fak,fbk->gfjk", u, u, v, v) / u.shape[1] ** 2
            first, second = ((tau * frequencies[n].double()).cos() for n in (i, j))
            position = (first[:, :, None] * second[:, None]).mean(0)
            k[name] = (content * position).sum((2, 3)).mean().item()
        size = math.sqrt(k["signal_signal"] * k["noise_noise"])
        expected = {"layer": state.layer} | k | {"normalised": k["signal_noise"] / size}
        assert terms == pytest.approx(expected)
        assert 0 < terms["normalised"] <= 1
    mean = sum(terms["normalised"] for terms in table.rows) / 2
    assert table["normalised"] == pytest.approx(mean)


IDS = torch.randint(1, 37, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


def test_losses_are_the_models_own(monkeypatch):
    model = make_signal_noise()
    losses = spectra.token_losses(model, IDS)
    assert losses.shape == (3, 39)
    assert losses.mean().item() == pytest.approx(model(IDS, labels=IDS).loss.item(), abs=1e-5)
    monkeypatch.setattr("prismlm.probes.texts.LOGIT_ROWS", 7)
    assert torch.allclose(spectra.token_losses(model, IDS), losses, atol=1e-6)


def test_short_losses_see_at_least_half_and_less_than_a_row():
    model = make_signal_noise()
    full, short = spectra.token_losses(model, IDS), spectra._short_losses(model, IDS, 12)
    assert torch.allclose(short[:, :11], full[:, :11], atol=1e-5)
    for t in range(12, 40):
        # Windows start every 6 tokens; the earliest that reaches t is the one that is taken.
        start = next(s for s in range(0, 40, 6) if s + 12 > t)
        assert 6 <= t - start <= 11
        expected = spectra.token_losses(model, IDS[:, start : t + 1])[:, -1]
        assert torch.allclose(short[:, t - 1], expected, atol=1e-5)


def test_buckets_are_means_over_documents(corpus):
    model = make_signal_noise(len(corpus.tokenizer))
    settings = {"length": 96, "trained_length": 32, "documents": 5}
    table = spectra.loss_against_length(model, corpus, split="all", **settings)
    assert table.facts == settings
    lows = [bucket["low"] for bucket in table.rows]
    assert [bucket["high"] + 1 for bucket in table.rows] == [*lows[1:], 96]
    assert 32 in lows
    # All the documents drawn, read as they are.
    numbers = corpus.split("all")
    drawn = np.random.default_rng(0).permutation(numbers[corpus.lengths[numbers] >= 96])[:5]
    rows = [corpus.tokens(int(corpus.starts[i]), 96).astype(np.int64) for i in drawn]
    ids = torch.from_numpy(np.stack(rows))
    losses, short = spectra.token_losses(model, ids), spectra._short_losses(model, ids, 32)

    def mean_and_error(values):
        both = values.mean().item(), values.std().item() / math.sqrt(5)
        return tuple(pytest.approx(value, abs=1e-9) for value in both)

    for bucket in table.rows:
        columns = slice(bucket["low"] - 1, bucket["high"])
        means, short_means = losses[:, columns].mean(1), short[:, columns].mean(1)
        assert (bucket["loss"], bucket["error"]) == mean_and_error(means)
        control = (bucket["short_loss"], bucket["difference"], bucket["difference_error"])
        if bucket["low"] < 32:
            assert control == (None, None, None)
        else:
            difference = mean_and_error(means - short_means)
            assert control == (pytest.approx(short_means.mean().item()), *difference)


def test_texts_that_cannot_be_used_are_refused(corpus):
    model = make_signal_noise(len(corpus.tokenizer))
    with pytest.raises(InputError, match=r"no document of .* has 100,000 tokens: the longest has"):
        spectra.loss_against_length(model, corpus, length=100_000)
    gpt2 = make_gpt2(len(corpus.tokenizer), positions=64)
    with pytest.raises(InputError, match=r"window of 65 tokens, .* 64 positions"):
        spectra.loss_against_length(gpt2, corpus, length=65)
    model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="losses are not finite"):
        spectra.loss_against_length(model, corpus, length=16, documents=1, split="all")
