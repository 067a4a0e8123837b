"""Interventions on channels: what they compute, where they hold, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from prismlm.errors import InputError
from prismlm.interventions.channels import MaskRead, MaskWrite, Reinitialise, intervene
from prismlm.layers.mixer_gates import MixerEvidence
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model, tokens

IDS = tokens(2, 20)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def model():
    return make_model()


def run(model, **inputs):
    return model(**({"input_ids": IDS} | inputs), output_gates=True, use_cache=False)


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


def densely(model, layer, **changes):
    """The logits of a copy whose layer has other gates."""
    other = copy.deepcopy(model)
    other.model.layers[layer].mixer.gates = Gates(**changes)
    return other(input_ids=IDS, use_cache=False).logits


def put(which, channel, value):
    def change(write, read):
        (write if which == "write" else read)[..., channel] = value

    return change


# Layer 0 has shared gates.
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("kind", [MaskWrite, MaskRead])
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_mask_is_its_equation(model, layer, kind, renormalise):
    which = "write" if kind is MaskWrite else "read"
    with intervene(model, kind(layer, 2, renormalise)):
        found = run(model)
    if renormalise:
        expected = densely(model, layer, scores=put(which, 2, -torch.inf))
    else:
        expected = densely(model, layer, gates=put(which, 2, 0.0))
    torch.testing.assert_close(found.logits, expected, **CLOSE)
    assert (found.logits - run(model).logits).abs().max() > 1e-3
    gate = getattr(found.gates[layer], which)
    other = getattr(found.gates[layer], "read" if which == "write" else "write")
    assert (gate[..., 2] == 0).all()
    assert (other[..., 2] > 0).all()
    torch.testing.assert_close(other.sum(-1), torch.ones(2, 20))
    if renormalise:
        torch.testing.assert_close(gate.sum(-1), torch.ones(2, 20))
    else:
        assert gate.sum(-1).max() < 1


@pytest.mark.parametrize("kind", [MaskWrite, MaskRead])
def test_in_groups_the_rest_of_the_group_shares_the_gate(kind):
    grouped = make_model(num_groups=2)
    which = "write" if kind is MaskWrite else "read"
    before = getattr(run(grouped).gates[1], which)
    with intervene(grouped, kind(1, 4, renormalise=True)):
        after = getattr(run(grouped).gates[1], which)
    assert torch.equal(after[..., :3], before[..., :3])
    rest = before[..., [3, 5]]
    torch.testing.assert_close(after[..., [3, 5]], rest / rest.sum(-1, keepdim=True))
    assert (after[..., 4] == 0).all()
    with (
        intervene(grouped, kind(1, 3, renormalise=True), kind(1, 4, renormalise=True)),
        pytest.raises(InputError, match=f"all 3 channels of group 1 of a {which} gate"),
        intervene(grouped, kind(1, 5, renormalise=True)),
    ):
        pass


def test_reinitialised_is_a_copy_with_that_prototype_drawn_anew(model):
    drawn = []
    for seed in (0, 0, 1):
        with intervene(model, Reinitialise(1, 4, seed)):
            drawn.append(run(model).logits)
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)
    assert (drawn[0] - drawn[2]).abs().max() > 1e-4
    rows = {}

    def note(module, args):
        rows["prototypes"] = args[0].prototypes

    with intervene(model, Reinitialise(1, 4)):
        handle = model.model.layers[1].mixer.gates.register_forward_pre_hook(note)
        run(model)
        handle.remove()
    own = model.model.layers[1].mixer.prototypes
    assert ((rows["prototypes"] != own).any(1) == (torch.arange(CHANNELS) == 4)).all()
    other = copy.deepcopy(model)
    other.model.layers[1].mixer.prototypes[4] = rows["prototypes"][4]
    torch.testing.assert_close(run(other).logits, drawn[0], rtol=0, atol=0)


def test_blocks_nest_and_together_are_one(model):
    masks = (MaskWrite(1, 0), MaskRead(1, 3, renormalise=True), MaskWrite(2, 5))
    with intervene(model, *masks):
        together = run(model).logits
    with intervene(model, masks[0]):
        outer = run(model).logits
        with intervene(model, masks[1]), intervene(model, masks[2]):
            torch.testing.assert_close(run(model).logits, together, rtol=0, atol=0)
        torch.testing.assert_close(run(model).logits, outer, rtol=0, atol=0)
    with intervene(model, Reinitialise(1, 0, 5)):
        last = run(model).logits
    with intervene(model, Reinitialise(1, 0, 4)), intervene(model, Reinitialise(1, 0, 5)):
        torch.testing.assert_close(run(model).logits, last, rtol=0, atol=0)


def test_they_hold_with_a_cache_and_padding(model):
    masks = (MaskWrite(0, 1, renormalise=True), MaskRead(2, 3), Reinitialise(1, 0))
    with intervene(model, *masks):
        whole = run(model).logits
        cache, parts = None, []
        for piece in IDS.split([7, 1, 12], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
        mask = torch.ones(2, 25, dtype=torch.int64)
        mask[:, :5] = 0
        ids = torch.cat([torch.zeros(2, 5, dtype=torch.int64), IDS], 1)
        padded = run(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(padded.logits[:, 5:], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (MaskWrite(LAYERS, 0), "no layer 3: the model's layers are 0 to 2"),
        (MaskRead(-1, 0), "no layer -1"),
        (Reinitialise(0, CHANNELS), "no channel 6 in layer 0: expected 0 to 5"),
        (MaskRead(0, -1), "no channel -1"),
        ("MaskRead", "not an intervention"),
    ],
)
def test_unknown_places_are_refused(model, intervention, message):
    with pytest.raises(InputError, match=message), intervene(model, intervention):
        pass


def test_what_cannot_be_is_refused(model):
    with pytest.raises(InputError, match=r"'llama' has no prototype mixer.*'prismlm_protot'"):
        intervene(make_llama(), MaskWrite(0, 0)).__enter__()
    for make in (
        lambda: MaskWrite(0, 1.5),
        lambda: MaskRead("0", 1),
        lambda: Reinitialise(0, 1, -1),
    ):
        with pytest.raises(InputError, match="expected a whole number"):
            make()
    all_but_one = [MaskWrite(1, k, renormalise=True) for k in range(CHANNELS - 1)]
    last = MaskWrite(1, CHANNELS - 1, renormalise=True)
    with (
        intervene(model, *all_but_one),
        pytest.raises(InputError, match="none is left to share"),
        intervene(model, last),
    ):
        pass
    # Zeros need nobody to share: the layer then writes nothing at all.
    with intervene(model, *(MaskWrite(1, k) for k in range(CHANNELS))):
        assert torch.isfinite(run(model).logits).all()
