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
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


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
    for gates, expected in zip(output.gates, record.layers, strict=True):
        assert torch.equal(gates.write, expected.write)
        assert torch.equal(gates.read, expected.read)
    assert output.gates[0].read is output.gates[0].write
    for ids in (A, B):
        assert (output.logits - run(model, ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize(("gate", "other"), [("write", "read"), ("read", "write")])
def test_one_gate_of_some_layers_is_clamped(model, record, gate, other):
    before = run(model).gates
    with intervene(model, ClampGates(record, layers=(0, 2), gates=gate)):
        after = run(model).gates
    # Layer 0 reads by its write gate: it is clamped completely, and stays shared.
    assert after[0].write is after[0].read
    assert torch.equal(after[0].write, record.layers[0].write)
    assert torch.equal(getattr(after[2], gate), getattr(record.layers[2], gate))
    # The inputs of the other gate have changed.
    for gates in (record.layers, before):
        assert not torch.equal(getattr(after[2], other), getattr(gates[2], other))


def test_an_alignment_names_the_recorded_positions(model, record):
    alignment, ids = [3, -1, 0, 0, -1], tokens(8, seed=2)
    before = run(model, ids).gates[0].write[0]
    with intervene(model, ClampGates(record, alignment=alignment)):
        after = run(model, ids).gates
    positions, sources = [0, 2, 3], [3, 0, 0]
    for gates, recorded in zip(after, record.layers, strict=True):
        assert torch.equal(gates.write[0, positions], recorded.write[0, sources])
        assert torch.equal(gates.read[0, positions], recorded.read[0, sources])
    # What layer 0 writes depends on its token alone, so other positions are as before.
    torch.testing.assert_close(after[0].write[0, [1, 4, 5, 6, 7]], before[[1, 4, 5, 6, 7]])


def test_caches_batches_generation_and_beams(model, record):
    options = {"attention_mask": torch.ones(1, LENGTH, dtype=torch.int64), "max_new_tokens": 6}
    options |= {"do_sample": False}
    with intervene(model, ClampGates(record)):
        expected = run(model).logits
        cache, parts, gates = None, [], []
        for piece in B.split([5, 1, 8]):
            output = run(model, piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
            gates.append(output.gates[1].read)
        torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)
        assert torch.equal(torch.cat(gates, 1), record.layers[1].read)
        batch = run(model, torch.stack([A, B])).logits
        torch.testing.assert_close(batch[1:], expected, **CLOSE)
        generated = model.generate(B[None], **options)[0]
        beams = model.generate(B[None], **options, num_beams=2)
    # Token by token without a cache: clamped to the end of the recorded text, own gates after it.
    with intervene(model, ClampGates(record, alignment=torch.arange(LENGTH))):
        ids = B
        for _ in range(6):
            ids = torch.cat([ids, run(model, ids).logits[0, -1].argmax()[None]])
        assert torch.equal(ids, generated)
        uncached = model.generate(B[None], **options, num_beams=2, use_cache=False)
        assert torch.equal(uncached, beams)


def test_masks_act_on_clamped_gates_and_the_last_clamp_wins(model, record):
    other = record_gates(model, tokens(LENGTH, seed=3))
    with intervene(model, ClampGates(record), ClampGates(other, layers=(1,)), MaskRead(1, 2)):
        gates = run(model).gates
    assert torch.equal(gates[1].write, other.layers[1].write)
    assert torch.equal(gates[2].write, record.layers[2].write)
    expected = other.layers[1].read.clone()
    expected[..., 2] = 0
    assert torch.equal(gates[1].read, expected)
    with intervene(model, ClampGates(record)), intervene(model, ClampGates(other)):
        assert torch.equal(run(model).gates[1].read, other.layers[1].read)
    # A clamped gate does not depend on prototypes.
    with intervene(model, ClampGates(record)):
        logits = run(model).logits
        with intervene(model, Reinitialise(1, 0)):
            assert torch.equal(run(model).logits, logits)
    mask = MaskWrite(1, 2, renormalise=True)
    for clamp in (ClampGates(record), ClampGates(record, layers=(1,), gates="write")):
        with pytest.raises(InputError, match="exclude channel 2"), intervene(model, mask, clamp):
            pass
    with intervene(model, mask, ClampGates(record, layers=(1,), gates="read")):
        assert run(model).gates[1].write[..., 2].abs().max() == 0


PADDED = (torch.arange(LENGTH) >= 2).long()[None]


@pytest.mark.parametrize(
    ("ids", "inputs", "message"),
    [
        (tokens(15), {}, "positions 0 to 14 and the recorded text has 14"),
        (tokens(9), {}, "reads positions 0 to 8 and the recorded text has 14"),
        (B, {"attention_mask": PADDED}, "batch with padding"),
        (B, {"position_ids": torch.arange(LENGTH)[None] % 9}, "hold several sequences"),
    ],
)
def test_passes_that_do_not_match_are_refused(model, record, ids, inputs, message):
    with intervene(model, ClampGates(record)):
        with pytest.raises(InputError, match=message):
            run(model, ids, **inputs)
        # An error in a pass does not end the block.
        assert torch.equal(run(model).gates[2].read, record.layers[2].read)


def test_other_passes_are_refused(model, record):
    with intervene(model, ClampGates(record)):
        with pytest.raises(IndexError):
            run(model, torch.full((LENGTH,), model.config.vocab_size))
        with pytest.raises(InputError, match="run the model, not a"):
            model.model.layers[0].mixer(torch.zeros(1, LENGTH, model.config.hidden_size))
    with (
        intervene(model, ClampGates(record, alignment=[0, 1])),
        pytest.raises(InputError, match="batch with padding"),
    ):
        run(model, attention_mask=PADDED)


def test_other_records_and_alignments_are_refused(model, record):
    with pytest.raises(InputError, match=r"Did you mean 'write'"):
        ClampGates(record, gates="writes")  # pyright: ignore[reportArgumentType]
    for alignment in ([0, LENGTH], [-2], [], [0.0, 1.0]):
        with pytest.raises(InputError, match="recorded text has 0 to 13"):
            ClampGates(record, alignment=alignment)
    with pytest.raises(InputError, match=r"\[1, 14\]: expected \[T\]"):
        record_gates(model, A[None])
    for other, clamp, message in (
        (model, ClampGates(record, (7,)), "no layer 7"),
        (make_model(num_hidden_layers=LAYERS + 1), ClampGates(record), "4 layers and the recorded"),
    ):
        with pytest.raises(InputError, match=message), intervene(other, clamp):
            pass
