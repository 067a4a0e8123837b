"""Clamping the gates of one text onto another."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.interventions.channels import (
    ClampGates,
    MaskRead,
    MaskWrite,
    Reinitialise,
    intervene,
    record_gates,
)
from tests.helpers.mixer_models import LAYERS, make_model, tokens

LENGTH = 14
A, B = tokens(LENGTH), tokens(LENGTH, seed=1)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def record(model):
    return record_gates(model, A)


def run(model, ids=B, **inputs):
    ids = ids[None] if ids.ndim == 1 else ids
    return model(input_ids=ids, output_gates=True, **({"use_cache": False} | inputs))


def test_a_clamp_replaces_the_gates_and_keeps_the_values(model, record):
    with intervene(model, ClampGates(record)):
        output = run(model)
    for gates, expected in zip(output.gates, record, strict=True):
        assert torch.equal(gates.write, expected.write)
        assert torch.equal(gates.read, expected.read)
    assert output.gates[0].read is output.gates[0].write
    for ids in (A, B):
        assert (output.logits - run(model, ids).logits).abs().max() > 1e-3


def test_an_alignment_names_the_recorded_positions(model, record):
    alignment, ids = [3, -1, 0, 0, -1, -1, -1, -1], tokens(8, seed=2)
    before = run(model, ids).gates[0].write[0]
    with intervene(model, ClampGates(record, alignment)):
        after = run(model, torch.stack([ids, ids])).gates
    positions, sources = [0, 2, 3], [3, 0, 0]
    for gates, recorded in zip(after, record, strict=True):
        assert torch.equal(gates.write[1, positions], recorded.write[0, sources])
        assert torch.equal(gates.read[0, positions], recorded.read[0, sources])
    # What layer 0 writes depends on its token alone, so other positions are as before.
    torch.testing.assert_close(after[0].write[0, [1, 4, 5, 6, 7]], before[[1, 4, 5, 6, 7]])


def test_masks_act_on_clamped_gates_and_the_last_clamp_wins(model, record):
    other = record_gates(model, tokens(LENGTH, seed=3))
    with intervene(model, ClampGates(record), ClampGates(other), MaskRead(1, 2)):
        gates = run(model).gates
    assert torch.equal(gates[1].write, other[1].write)
    expected = other[1].read.clone()
    expected[..., 2] = 0
    assert torch.equal(gates[1].read, expected)
    with intervene(model, ClampGates(record)), intervene(model, ClampGates(other)):
        assert torch.equal(run(model).gates[1].read, other[1].read)
    # A clamped gate does not depend on prototypes.
    with intervene(model, ClampGates(record)):
        logits = run(model).logits
        with intervene(model, Reinitialise(1, 0)):
            assert torch.equal(run(model).logits, logits)
    mask = MaskWrite(1, 2, renormalise=True)
    with pytest.raises(InputError, match="exclude channel 2"):
        intervene(model, mask, ClampGates(record)).__enter__()


PADDED = (torch.arange(LENGTH) >= 2).long()[None]


@pytest.mark.parametrize(
    ("ids", "inputs"),
    [
        (tokens(15), {}),
        (tokens(9), {}),
        (B, {"attention_mask": PADDED}),
        (B, {"position_ids": torch.arange(LENGTH)[None] % 9}),
    ],
)
def test_passes_that_do_not_match_are_refused(model, record, ids, inputs):
    with intervene(model, ClampGates(record)):
        with pytest.raises(InputError, match="the clamp has 14: read one complete text"):
            run(model, ids, **inputs)
        # An error in a pass does not end the block.
        cache = run(model, use_cache=True).past_key_values
        assert torch.equal(run(model).gates[2].read, record[2].read)
        with pytest.raises(InputError, match="without a cache"):
            run(model, past_key_values=cache, use_cache=True)


def test_other_records_and_alignments_are_refused(model, record):
    for alignment in ([0, LENGTH], [-2], [], [0.0, 1.0]):
        with pytest.raises(InputError, match="recorded text has 0 to 13"):
            ClampGates(record, alignment=alignment)
    with pytest.raises(InputError, match=r"\[1, 14\]: expected \[T\]"):
        record_gates(model, A[None])
    with pytest.raises(InputError, match="4 layers and the recorded"):
        intervene(make_model(num_hidden_layers=LAYERS + 1), ClampGates(record)).__enter__()
