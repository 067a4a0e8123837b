"""What is read of models with uncertainty feedback: the pass that has its codes, and no other."""

import pytest
import torch

from prismlm.instruments.heads import read_states_and_heads
from prismlm.instruments.heads.use import head_uses
from prismlm.ops.signal_noise_attention import attention_weights
from tests.helpers.feedback_families import attach_drawn
from tests.helpers.feedback_models import make_fed_gpt2
from tests.helpers.head_models import make_batch, make_signal_noise, random_rows

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
