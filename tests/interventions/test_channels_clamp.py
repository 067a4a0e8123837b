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


def test_every_layer_clamped_has_the_other_texts_gates_and_the_own_values(model, record):
    with intervene(model, ClampGates(record)):
        found = run(model)
    for gates, wanted in zip(found.gates, record.layers, strict=True):
        assert torch.equal(gates.write, wanted.write)
        assert torch.equal(gates.read, wanted.read)
    assert found.gates[0].read is found.gates[0].write
    assert (found.logits - run(model).logits).abs().max() > 1e-3
    assert (found.logits - run(model, A).logits).abs().max() > 1e-3


@pytest.mark.parametrize("gate", ["write", "read"])
def test_one_gate_of_some_layers(model, record, gate):
    own = run(model).gates
    with intervene(model, ClampGates(record, layers=(0, 2), gates=gate)):
        found = run(model).gates
    other = "read" if gate == "write" else "write"
    # Layer 0 reads by its write gate: it is clamped as a whole, and stays shared.
    assert found[0].write is found[0].read
    assert torch.equal(found[0].write, record.layers[0].write)
    assert torch.equal(getattr(found[2], gate), getattr(record.layers[2], gate))
    # Its inputs have changed, so the own gate is another than without a clamp.
    assert not torch.equal(getattr(found[2], other), getattr(record.layers[2], other))
    assert not torch.equal(getattr(found[2], other), getattr(own[2], other))


def test_an_alignment_says_which_position_and_which_stay(model, record):
    alignment = [3, -1, 0, 0, -1]
    ids = tokens(8, seed=2)
    own = run(model, ids).gates[0].write[0]
    with intervene(model, ClampGates(record, alignment=alignment)):
        found = run(model, ids).gates
    for layer, gates in enumerate(found):
        for place, source in enumerate(alignment):
            if source >= 0:
                wanted = record.layers[layer]
                assert torch.equal(gates.write[0, place], wanted.write[0, source])
                assert torch.equal(gates.read[0, place], wanted.read[0, source])
    # What layer 0 writes follows from its token alone, so what is not clamped is as before.
    torch.testing.assert_close(found[0].write[0, [1, 4, 5, 6, 7]], own[[1, 4, 5, 6, 7]])


def test_pieces_rows_and_generation(model, record):
    clamp = ClampGates(record)
    with intervene(model, clamp):
        whole = run(model)
        cache, parts, gates = None, [], []
        for piece in B.split([5, 1, 8]):
            output = run(model, piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
            gates.append(output.gates[1].read)
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.cat(gates, 1), record.layers[1].read)
        both = run(model, torch.stack([A, B]))
        torch.testing.assert_close(both.logits[1:], whole.logits, rtol=1e-4, atol=1e-5)
        mask = torch.ones(1, LENGTH, dtype=torch.int64)
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        written = model.generate(B[None], **options)[0]
        beams = model.generate(B[None], **options, num_beams=2)
    # Clamped up to the end of the recorded text, own gates after it: token by token from scratch.
    with intervene(model, ClampGates(record, alignment=torch.arange(LENGTH))):
        ids = B
        for _ in range(6):
            ids = torch.cat([ids, run(model, ids).logits[0, -1].argmax()[None]])
        again = model.generate(B[None], **options, num_beams=2, use_cache=False)
    assert torch.equal(ids, written)
    assert torch.equal(again, beams)


def test_masks_act_on_clamped_gates_and_the_last_clamp_holds(model, record):
    other = record_gates(model, tokens(LENGTH, seed=3))
    with intervene(model, ClampGates(record), ClampGates(other, layers=(1,)), MaskRead(1, 2)):
        found = run(model).gates
    assert torch.equal(found[1].write, other.layers[1].write)
    assert torch.equal(found[2].write, record.layers[2].write)
    expected = other.layers[1].read.clone()
    expected[..., 2] = 0
    assert torch.equal(found[1].read, expected)
    with intervene(model, ClampGates(record)), intervene(model, ClampGates(other)):
        assert torch.equal(run(model).gates[1].read, other.layers[1].read)
    # A clamped gate does not ask for prototypes.
    with intervene(model, ClampGates(record)):
        wanted = run(model).logits
        with intervene(model, Reinitialise(1, 0)):
            assert torch.equal(run(model).logits, wanted)
    mask = MaskWrite(1, 2, renormalise=True)
    for held in (
        [mask, ClampGates(record)],
        [mask, ClampGates(record, layers=(1,), gates="write")],
    ):
        with pytest.raises(InputError, match="exclude channel 2"), intervene(model, *held):
            pass
    with intervene(model, mask, ClampGates(record, layers=(1,), gates="read")):
        assert run(model).gates[1].write[..., 2].abs().max() == 0


def test_passes_that_do_not_fit_are_refused(model, record):
    with intervene(model, ClampGates(record)):
        with pytest.raises(InputError, match="positions 0 to 14 and the recorded text has 14"):
            run(model, tokens(15))
        with pytest.raises(InputError, match="reads positions 0 to 8 and the recorded text has 14"):
            run(model, tokens(9))
        padded = torch.ones(1, LENGTH, dtype=torch.int64)
        padded[0, :2] = 0
        with pytest.raises(InputError, match="batch with padding"):
            run(model, attention_mask=padded)
        packed = torch.arange(LENGTH)[None] % 9
        with pytest.raises(InputError, match="hold several sequences"):
            run(model, position_ids=packed)
        with pytest.raises(IndexError):
            run(model, torch.full((LENGTH,), model.config.vocab_size))
        with pytest.raises(InputError, match="run the model, not a"):
            model.model.layers[0].mixer(torch.zeros(1, LENGTH, model.config.hidden_size))
        # After an error the block goes on.
        assert torch.equal(run(model).gates[2].read, record.layers[2].read)
    with (
        intervene(model, ClampGates(record, alignment=[0, 1])),
        pytest.raises(InputError, match="batch with padding"),
    ):
        run(model, attention_mask=padded)


def test_records_and_alignments_that_cannot_be_are_refused(model, record):
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
