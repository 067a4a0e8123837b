"""Top sequences against all of a corpus; gates, memory and half-lives against the double sum."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.decoders.protot import half_life, half_lives
from prismlm.ops.prototype_mixer import naive
from prismlm.probes.channels.activations import (
    Activations,
    LayerCurves,
    discounted_mass,
    read_activations,
    read_channels,
    read_text,
)
from tests.helpers.mixer_models import CHANNELS, LAYERS, VOCABULARY, make_llama, make_model, tokens


def test_the_ranking_is_that_of_all_sequences(model, sequences, alone):
    read = read_activations(model, sequences, ("write",))
    assert list(read.values) == [("write", layer) for layer in range(LAYERS)]
    for channel, best in enumerate(read.top_sequences("write", 1, count=5, tokens=3)):
        gates = {start: (ids, routing[1].write[0, :, channel]) for start, _, ids, routing in alone}
        totals = sorted((float(gate.sum()) for _, gate in gates.values()), reverse=True)
        assert [row["total"] for row in best] == pytest.approx(totals[:5], rel=1e-4)
        for row in best:
            ids, gate = gates[row["position"]]
            assert row["total"] == pytest.approx(float(gate.sum()), rel=1e-4)
            largest = gate.topk(3).values.tolist()
            assert [t["gate"] for t in row["tokens"]] == pytest.approx(largest, rel=1e-3)
            for token in row["tokens"]:
                assert token["token_id"] == ids[token["position"] - row["position"]]


def test_sequences_by_hand():
    write = torch.tensor([0.1, 0.4, 0.1, 0.4, 0.2, 0.2, 0.1])[:, None]
    columns = (torch.tensor([20, 24]), torch.tensor([4, 3]), torch.tensor([7, 8]))
    read = Activations(torch.arange(7), *columns, {("write", 0): write})
    ((first, second),) = read.top_sequences("write", 0, count=3, tokens=3)
    assert (first["position"], first["length"], first["document"]) == (20, 4, 7)
    assert first["total"] == pytest.approx(1.0)
    # The earlier of two equal gates comes first.
    assert [t["position"] for t in first["tokens"]] == [21, 23, 20]
    assert [t["token_id"] for t in first["tokens"]] == [1, 3, 0]
    assert second["total"] == pytest.approx(0.5)
    assert [t["position"] for t in second["tokens"]] == [24, 25, 26]


@pytest.fixture(scope="module")
def random_model():
    return make_model()


@pytest.mark.parametrize(("layer", "mode"), [(0, "channel"), (1, "channel"), (1, "token")])
def test_memory_and_read_gate_give_what_the_mixer_reads(random_model, layer, mode):
    model = random_model if mode == "channel" else make_model(decay_mode="token")
    ids = tokens(18)
    (curves,) = read_channels(model, ids, [layer])
    assert curves.layer == layer
    evidence = model(ids[None], output_gates=True).gates[layer]
    torch.testing.assert_close(curves.write, evidence.write[0])
    torch.testing.assert_close(curves.read, evidence.read[0])
    if mode == "channel":
        assert torch.equal(curves.decay, model.model.layers[layer].mixer.decay)
        decay = curves.decay
    else:
        assert curves.decay.shape == (18, CHANNELS)
        assert curves.decay.std(0).min() > 0.01
        decay = curves.decay[None]
        with pytest.raises(InputError, match=r"depend on the token .* read_channels"):
            half_lives(model)
    # Values that are the identity: the mean is then a weight for each position.
    expected, _ = naive.prefix_mean(evidence.write, evidence.read, torch.eye(18)[None], decay)
    memory = torch.stack([curves.memory(k) for k in range(CHANNELS)], -1)
    result = (memory * curves.read[:, None].double()).sum(-1)
    torch.testing.assert_close(result.float(), expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(memory[1:].sum(1), torch.ones(17, CHANNELS).double())


def test_half_life_mass_and_memory_by_hand_where_each_token_has_a_decay():
    # 0.5 halves at each step, 0.25 twice at each, √½ at every second.
    decay = torch.tensor([0.5, 0.25, math.sqrt(0.5)], dtype=torch.float64)
    torch.testing.assert_close(half_life(decay), torch.tensor([1.0, 0.5, 2.0]).double())
    write = torch.tensor([[0.5], [1.0], [0.25]])
    decay = torch.tensor([[0.5], [0.125], [0.9]])
    mass = discounted_mass(write, decay)
    # ½·0.5 = ¼, then ⅛·(¼ + 1) = 0.15625; the last decay acts behind the text.
    torch.testing.assert_close(mass, torch.tensor([[0.0], [0.25], [0.15625]]).double())
    memory = LayerCurves(0, write, write, mass, decay).memory(0)
    expected = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0.2, 0.8, 0]]).double()
    torch.testing.assert_close(memory, expected)
    # ½·⅛·½ = 2^−5 in three positions.
    lives = LayerCurves(0, write, write, mass, torch.tensor([[0.5], [0.125], [0.5]])).half_life
    assert lives.item() == pytest.approx(3 / 5)
    # A channel whose mass underflowed reads as empty.
    write, decay = torch.eye(60, 1), torch.tensor([1e-2])
    memory = LayerCurves(0, write, write, discounted_mass(write, decay), decay).memory(0)
    # 0.01^i is below 1e-30 from i = 16 on.
    assert memory[1:15, 0].tolist() == pytest.approx([1] * 14)
    assert (memory[16:] == 0).all()


def test_a_text_is_read_with_its_tokens_and_what_cannot_be_read_is_refused(corpus, random_model):
    text = "Old maps forgets letters in a box."
    result = read_text(random_model, corpus.tokenizer, text, [1])
    assert "".join(result.text.words) == text
    assert list(result.token_ids) == corpus.tokenizer(text)["input_ids"]
    assert result.curves[0].write.shape == (len(result.text.tokens), CHANNELS)
    with pytest.raises(InputError, match="no channel 6 in layer 1"):
        result.curves[0].memory(CHANNELS)
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        read_channels(make_llama(VOCABULARY), tokens(4))
