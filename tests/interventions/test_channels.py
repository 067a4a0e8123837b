"""Interventions on channels: what they compute, where they hold, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from prismlm.errors import InputError
from prismlm.interventions.channels import (
    ClampGates,
    MaskRead,
    MaskWrite,
    Reinitialise,
    intervene,
    record_gates,
)
from prismlm.layers.prototype_mixer import MixerEvidence
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model, tokens

IDS = tokens(2, 20)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model():
    return make_model()


def run(model, ids=IDS, **inputs):
    return model(input_ids=ids, output_gates=True, **({"use_cache": False} | inputs))


class Gates(nn.Module):
    """Gates from scratch: their equation, with a change of the scores and one of the gates."""

    def __init__(self, scores=lambda write, read: None, gates=lambda write, read: None):
        super().__init__()
        self.scores, self.gates = scores, gates

    def forward(self, inputs):
        x = inputs.x @ inputs.prototypes.T / inputs.log_write_temperature.exp()
        q = x.clone()
        if inputs.read_map is not None:
            folded = inputs.prototypes @ inputs.read_map
            q = inputs.x @ folded.T / inputs.log_read_temperature.exp()
        self.scores(x, q)
        write, read = x.softmax(-1), q.softmax(-1)
        self.gates(write, read)
        return MixerEvidence(write, read)


MASKS = [(MaskWrite, "write", "read"), (MaskRead, "read", "write")]


# Layer 0 has shared gates.
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(("kind", "gate", "other"), MASKS)
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_mask_is_its_equation(model, layer, kind, gate, other, renormalise):
    def change(write, read):
        (write if gate == "write" else read)[..., 2] = -torch.inf if renormalise else 0.0

    # In float32 the order of sums, which a machine chooses, changes more than the bounds allow.
    model = copy.deepcopy(model).double()
    reference = copy.deepcopy(model)
    gates = Gates(**{"scores" if renormalise else "gates": change})
    reference.model.layers[layer].mixer.gates = gates
    with intervene(model, kind(layer, 2, renormalise)):
        output = run(model)
    expected = reference(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(output.logits, expected, **CLOSE)
    assert (output.logits - run(model).logits).abs().max() > 1e-3
    masked, unmasked = (getattr(output.gates[layer], name) for name in (gate, other))
    assert (masked[..., 2] == 0).all()
    assert (unmasked[..., 2] > 0).all()
    torch.testing.assert_close(unmasked.sum(-1), torch.ones(2, 20).double())
    if renormalise:
        torch.testing.assert_close(masked.sum(-1), torch.ones(2, 20).double())
    else:
        assert masked.sum(-1).max() < 1


@pytest.mark.parametrize(("kind", "gate", "_"), MASKS)
def test_the_other_channels_of_a_group_share_its_gate(kind, gate, _):
    grouped = make_model(num_groups=2)
    before = getattr(run(grouped).gates[1], gate)
    with intervene(grouped, kind(1, 4, renormalise=True)):
        after = getattr(run(grouped).gates[1], gate)
    assert torch.equal(after[..., :3], before[..., :3])
    rest = before[..., [3, 5]]
    torch.testing.assert_close(after[..., [3, 5]], rest / rest.sum(-1, keepdim=True))
    assert (after[..., 4] == 0).all()
    with (
        intervene(grouped, kind(1, 3, renormalise=True), kind(1, 4, renormalise=True)),
        pytest.raises(InputError, match=f"all 3 channels of group 1 of a {gate} gate"),
        intervene(grouped, kind(1, 5, renormalise=True)),
    ):
        pass


def test_reinitialise_replaces_one_prototype_by_the_seed(model):
    logits, prototypes = [], []

    def record(module, args):
        prototypes.append(args[0].prototypes)

    for seed in (0, 0, 1):
        with intervene(model, Reinitialise(1, 4, seed)):
            handle = model.model.layers[1].mixer.gates.register_forward_pre_hook(record)
            logits.append(run(model).logits)
            handle.remove()
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-4
    copied = copy.deepcopy(model)
    original = copied.model.layers[1].mixer.prototypes
    assert ((prototypes[0] != original).any(1) == (torch.arange(CHANNELS) == 4)).all()
    original[4] = prototypes[0][4]
    assert torch.equal(run(copied).logits, logits[0])


def test_nested_blocks_equal_one_block(model):
    masks = (MaskWrite(1, 0), MaskRead(1, 3, renormalise=True), MaskWrite(2, 5))
    with intervene(model, *masks):
        expected = run(model).logits
    with intervene(model, masks[0]):
        outer = run(model).logits
        with intervene(model, masks[1]), intervene(model, masks[2]):
            assert torch.equal(run(model).logits, expected)
        assert torch.equal(run(model).logits, outer)
    with intervene(model, Reinitialise(1, 0, 5)):
        last = run(model).logits
    with intervene(model, Reinitialise(1, 0, 4)), intervene(model, Reinitialise(1, 0, 5)):
        assert torch.equal(run(model).logits, last)


def test_interventions_apply_with_a_cache_and_padding(model):
    masks = (MaskWrite(0, 1, renormalise=True), MaskRead(2, 3), Reinitialise(1, 0))
    with intervene(model, *masks):
        expected = run(model).logits
        cache, parts = None, []
        for piece in IDS.split([7, 1, 12], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
        mask = torch.ones(2, 25, dtype=torch.int64)
        mask[:, :5] = 0
        ids = torch.cat([torch.zeros(2, 5, dtype=torch.int64), IDS], 1)
        padded = run(model, ids, attention_mask=mask)
    torch.testing.assert_close(padded.logits[:, 5:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (MaskWrite(LAYERS, 0), "no layer 3: the model's layers are 0 to 2"),
        (Reinitialise(0, CHANNELS), "no channel 6 in layer 0: expected 0 to 5"),
    ],
)
def test_unknown_layers_and_channels_are_refused(model, intervention, message):
    with pytest.raises(InputError, match=message):
        intervene(model, intervention).__enter__()
    with pytest.raises(InputError, match=r"'llama' has no prototype mixer.*'prismlm_protot'"):
        intervene(make_llama(), intervention).__enter__()


# -- clamps of the gates of one text onto another

LENGTH = 14
A, B = tokens(1, LENGTH), tokens(1, LENGTH, seed=1)


@pytest.fixture(scope="module")
def record(model):
    return record_gates(model, A[0])


def test_a_clamp_replaces_the_gates_and_keeps_the_values(model, record):
    with intervene(model, ClampGates(record)):
        output = run(model, B)
    for gates, expected in zip(output.gates, record, strict=True):
        assert torch.equal(gates.write, expected.write)
        assert torch.equal(gates.read, expected.read)
    assert output.gates[0].read is output.gates[0].write
    for ids in (A, B):
        assert (output.logits - run(model, ids).logits).abs().max() > 1e-3


def test_an_alignment_names_the_recorded_positions(model, record):
    alignment, ids = [3, -1, 0, 0, -1, -1, -1, -1], tokens(1, 8, seed=2)
    before = run(model, ids).gates[0].write[0]
    with intervene(model, ClampGates(record, alignment)):
        after = run(model, torch.cat([ids, ids])).gates
    positions, sources = [0, 2, 3], [3, 0, 0]
    for gates, recorded in zip(after, record, strict=True):
        assert torch.equal(gates.write[1, positions], recorded.write[0, sources])
        assert torch.equal(gates.read[0, positions], recorded.read[0, sources])
    # What layer 0 writes depends on its token alone, so other positions are as before.
    torch.testing.assert_close(after[0].write[0, [1, 4, 5, 6, 7]], before[[1, 4, 5, 6, 7]])


def test_masks_act_on_clamped_gates_and_the_last_clamp_wins(model, record):
    other = record_gates(model, tokens(LENGTH, seed=3))
    with intervene(model, ClampGates(record), ClampGates(other), MaskRead(1, 2)):
        gates = run(model, B).gates
    assert torch.equal(gates[1].write, other[1].write)
    expected = other[1].read.clone()
    expected[..., 2] = 0
    assert torch.equal(gates[1].read, expected)
    with intervene(model, ClampGates(record)), intervene(model, ClampGates(other)):
        assert torch.equal(run(model, B).gates[1].read, other[1].read)
    mask = MaskWrite(1, 2, renormalise=True)
    with pytest.raises(InputError, match="has no softmax"):
        intervene(model, mask, ClampGates(record)).__enter__()
    with pytest.raises(InputError, match="of another model"):
        intervene(make_model(num_hidden_layers=LAYERS + 1), ClampGates(record)).__enter__()


PADDED = (torch.arange(LENGTH) >= 2).long()[None]


@pytest.mark.parametrize(
    ("ids", "inputs"),
    [
        (tokens(1, 15), {}),
        (B, {"attention_mask": PADDED}),
        (B, {"position_ids": torch.arange(LENGTH)[None] % 9}),
    ],
)
def test_passes_that_do_not_match_are_refused(model, record, ids, inputs):
    with intervene(model, ClampGates(record)):
        with pytest.raises(InputError, match="the clamp has 14: read one complete text"):
            run(model, ids, **inputs)
        cache = run(model, B, use_cache=True).past_key_values
        with pytest.raises(InputError, match="without a cache"):
            run(model, B, past_key_values=cache, use_cache=True)
