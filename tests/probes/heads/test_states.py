"""Rates against their formulas, and states that do not depend on batches."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.ops.signal_noise_attention import attention_weights
from prismlm.probes.heads import (
    layer_rates,
    read_states_and_heads,
)
from prismlm.probes.heads.states import (
    AttentionStates,
    coding_rate,
    incoherence,
    rates_of,
    read_states,
)
from prismlm.probes.heads.use import head_uses
from tests.helpers.feedback_families import attach_drawn
from tests.helpers.feedback_models import make_fed_gpt2
from tests.helpers.head_models import make_batch, make_gpt2, make_signal_noise, random_rows


def test_hand_computed():
    # One point of norm 5 in two dimensions: ½ log(1 + 2 · 25 / 0.25).
    point = torch.tensor([[3.0, 4.0]])
    assert coding_rate(point).item() == pytest.approx(math.log(201) / 2)
    assert coding_rate(point, distortion=5.0).item() == pytest.approx(math.log(3) / 2)
    # Two orthogonal points: two directions of ½ log(1 + 2/2 · 4 / 1) each.
    points = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert coding_rate(points, distortion=1.0).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (40, 5), (5, 5)])
def test_both_grams_give_the_determinant(shape):
    z = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert coding_rate(z, distortion=0.3).item() == pytest.approx(direct(z, z.shape[1], 0.3))


def test_incoherence():
    eye = torch.eye(6)
    assert incoherence(eye[:, :2], eye[:, 2:]).item() == 0
    assert incoherence(eye[:, :1], 3 * eye[:, :1]).item() == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100, 400, generator=generator)
    assert incoherence(a, b).item() == pytest.approx(0.1, rel=0.05)


ROWS = random_rows(30, 18, 25)


def states_of(model, positions=2048, **settings):
    return read_states(model, [make_batch(*ROWS)], positions=positions, **settings)


def direct(z, width, distortion=0.5):
    inner = torch.eye(len(z), dtype=torch.float64) + width / (len(z) * distortion**2) * z @ z.T
    return float(torch.linalg.slogdet(inner).logabsdet / 2)


def test_states_are_what_the_layer_reads_and_adds():
    model = make_signal_noise()
    layer = model.model.layers[1].attention
    kept = {}
    handle = layer.register_forward_hook(lambda m, args, out: kept.update(z=args[0], out=out))
    model(torch.tensor([ROWS[0]]))
    handle.remove()
    one = read_states(model, [make_batch(ROWS[0])])[1]
    assert (one.layer, one.attention) == (1, layer)
    assert one.noise_weight == pytest.approx(0.1)
    assert one.positions.tolist() == list(range(30))
    assert torch.allclose(one.inputs, kept["z"][0], atol=1e-6)
    assert torch.allclose(one.steps, kept["out"].output[0], atol=1e-6)
    assert torch.allclose(one.projections().float(), kept["out"].projections[0], atol=1e-5)


def test_a_draw_depends_on_the_seed_and_not_on_batches():
    model = make_signal_noise()
    found = states_of(model, 20)
    starts = [0, 30, 48]
    parts = [make_batch(r, width=40, start=s) for r, s in zip(ROWS, starts, strict=True)][::-1]
    again = read_states(model, parts, positions=20)
    assert len(found[0].positions) == 20
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.allclose(one.inputs, other.inputs, atol=1e-5)
        assert torch.allclose(one.steps, other.steps, atol=1e-5)
    other = states_of(model, 20, seed=1)
    assert not torch.equal(other[0].positions, found[0].positions)
    assert len(states_of(model)[0].positions) == 73


def test_rates_are_their_formulas():
    model = make_signal_noise()
    for one, found in zip(states_of(model), layer_rates(states_of(model)).rows, strict=True):
        z, steps = one.inputs.double(), one.steps.double()
        weight = one.attention.projection.weight.double()
        u = [weight[4 * h : 4 * h + 4].T for h in range(8)]

        def expected(points, u=u, weight=found["noise_weight"]):
            signal = sum(direct(points @ u[h], 4) for h in range(4))
            noise = sum(direct(points @ u[h], 4) for h in range(4, 8))
            return [direct(points, 16), signal, noise, signal - weight * noise]

        def close(rates, points):
            assert list(rates.values()) == pytest.approx(expected(points), rel=1e-6)

        after = z + steps
        close(found["before"], z)
        close(found["after"], after)
        assert found["gain"] == found["after"]["difference"] - found["before"]["difference"]
        scaled = expected(z * (after.norm() / z.norm()))[-1]
        gain = found["after"]["difference"] - scaled
        assert found["gain_over_scaled"] == pytest.approx(gain, rel=1e-6)
        assert found["step_size"] == pytest.approx(float(steps.norm() / z.norm()))
        s, n = torch.cat(u[:4], 1), torch.cat(u[4:], 1)
        own = float((s.T @ n).norm() / (s.norm() * n.norm()))
        assert found["incoherence"]["own"] == pytest.approx(own)
        assert found["incoherence"]["random"] == pytest.approx(1 / 4, rel=0.15)
        assert found["positions"] == 73


def test_gains_by_hand():
    """Heads of size 1 along both axes, two positions: rates are ½ ln(1 + 2 Σ z²)."""
    z, steps = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    dictionary = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
    states = AttentionStates(0, None, 0.5, dictionary, torch.arange(2), z, steps)

    def swaps(seed):
        return torch.randperm(2, generator=torch.Generator().manual_seed(seed)).tolist() == [1, 0]

    (found,) = layer_rates([states], seed=next(s for s in range(99) if swaps(s))).rows
    # ΔR = R(z₁) − ½ R(z₂): of (1, 0), (0, 1); of (2, 0), (0, 4); of (1, 3), (1, 1).
    before, after = math.log(3) / 4, math.log(9) / 2 - math.log(33) / 4
    shuffled = math.log(5) / 2 - math.log(21) / 4
    # Stretched from √2 to √20: Σ z² = 10 along both.
    scaled = math.log(21) / 4
    assert found["gain"] == pytest.approx(after - before)
    assert found["gain_over_shuffled"] == pytest.approx(after - shuffled)
    assert found["gain_over_scaled"] == pytest.approx(after - scaled)
    assert found["step_size"] == pytest.approx(math.sqrt(10 / 2))
    (same,) = layer_rates([states], seed=next(s for s in range(99) if not swaps(s))).rows
    assert same["gain_over_shuffled"] == 0


def test_states_and_heads_come_from_the_same_passes():
    model, batches = make_signal_noise(), [make_batch(row) for row in ROWS]
    calls = []
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    states, uses = read_states_and_heads(model, batches)
    handle.remove()
    assert len(calls) == 3
    assert uses == head_uses(model, batches)
    for one, alone in zip(states, read_states(model, batches), strict=True):
        assert torch.equal(one.positions, alone.positions)
        assert torch.equal(one.inputs, alone.inputs)
        assert torch.equal(one.steps, alone.steps)
        assert torch.equal(one.dictionary, alone.dictionary)


def test_a_step_is_read_at_another_length_too():
    states = states_of(make_signal_noise())
    plain = layer_rates(states).rows
    same = layer_rates(states, lengths=[one["step_size"] for one in plain]).rows
    double = layer_rates(states, lengths=[2 * one["step_size"] for one in plain]).rows
    for one, own, longer, state in zip(plain, same, double, states, strict=True):
        assert one["gain_resized"] is None
        assert own["gain_resized"] == pytest.approx(own["gain"], rel=1e-9)
        moved = state.inputs.double() + 2 * state.steps.double()
        expected = rates_of(moved, state.dictionary.double(), state.noise_weight)
        gain = expected["difference"].item() - one["before"]["difference"]
        assert longer["gain_resized"] == pytest.approx(gain)


def test_the_gradient_is_that_of_finite_differences():
    model = make_signal_noise()
    one = states_of(model)[0]
    (found,) = layer_rates([one]).rows
    z, steps, size = one.inputs.double(), one.steps.double(), 1e-5

    def value(points):
        return rates_of(points, one.dictionary, one.noise_weight)["difference"].item()

    slope = (value(z + size * steps) - value(z - size * steps)) / (2 * size)
    z.requires_grad_()
    u = one.dictionary.double()
    total = rates_of(z, u, one.noise_weight)["difference"]
    (exact,) = torch.autograd.grad(total, z)
    norm = float(exact.norm() * steps.norm())
    assert found["gradient_cosine"] == pytest.approx(slope / norm, rel=1e-4)


def test_what_cannot_be_read_is_refused():
    model, batch = make_signal_noise(), make_batch(*ROWS)
    with pytest.raises(InputError, match="'gpt2' has no signal and noise dictionaries"):
        read_states(make_gpt2(), [batch])
    with pytest.raises(InputError, match="fewer than two tokens"):
        read_states(model, [make_batch([5])])
    with pytest.raises(InputError, match="the number of positions is 1"):
        read_states(model, [batch], positions=1)
    with pytest.raises(InputError, match="distortion"):
        layer_rates(states_of(model), distortion=0.0)
    model.model.layers[1].attention.projection.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        layer_rates(states_of(model)[1:])


(ROW,) = random_rows(30)
LEAST = 16


def last_call(layer, model):
    """Return what a layer read and gave in the last of the passes that a call of the model takes.

    Those before it only tell the codes.
    """
    calls = []
    handle = layer.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    model(torch.tensor([ROW]), use_cache=False)
    handle.remove()
    return calls[-1]


def self_shares(weights):
    return weights[0].diagonal(0, 1, 2)[:, LEAST - 1 :].mean(1).tolist()


@pytest.mark.parametrize("passes", [1, 2])
def test_states_and_heads_are_those_of_the_whole_model(passes):
    model = make_signal_noise()
    plain, plain_uses = read_states_and_heads(model, [make_batch(ROW)])
    attach_drawn(model, 64, deviation=3.0, passes=passes)
    states, uses = read_states_and_heads(model, [make_batch(ROW)])
    layer = model.model.layers[1].attention
    inputs, output = last_call(layer, model)
    assert states[1].positions.tolist() == list(range(30))
    assert torch.allclose(states[1].inputs, inputs[0], atol=1e-5)
    assert torch.allclose(states[1].steps, output.output[0], atol=1e-5)
    assert (states[1].inputs - plain[1].inputs).abs().max() > 0.5
    signal, noise = output.projections.split(layer.heads, 1)
    frequencies = {
        "signal_frequencies": layer.signal_frequencies,
        "noise_frequencies": layer.noise_frequencies,
    }
    weights = attention_weights(signal, noise, **frequencies, scale=layer.scale)
    found = [use["self_share"] for use in uses.rows if use["layer"] == 1]
    assert found == pytest.approx(self_shares(weights), abs=1e-5)
    assert uses["queries"] == 30 - LEAST + 1
    assert uses.rows != plain_uses.rows


@pytest.mark.parametrize("passes", [1, 2])
def test_heads_of_other_decoders_too(passes):
    model, _ = make_fed_gpt2(deviation=3.0, passes=passes)
    uses = head_uses(model, [make_batch(ROW)])
    model.set_attn_implementation("eager")
    expected = model(torch.tensor([ROW]), output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(expected):
        found = [use["self_share"] for use in uses.rows if use["layer"] == layer]
        assert found == pytest.approx(self_shares(weights), abs=1e-5)


def test_rows_in_one_batch_are_fed_their_own_codes():
    model = make_signal_noise()
    attach_drawn(model, 64, deviation=3.0, passes=2)
    rows = random_rows(30, 18)
    together, _ = read_states_and_heads(model, [make_batch(*rows)])
    alone, _ = read_states_and_heads(
        model, [make_batch(rows[0]), make_batch(rows[1], width=40, start=30)]
    )
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.allclose(one.inputs, other.inputs, atol=1e-4)
