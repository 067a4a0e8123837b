"""The sequences in which a channel writes most, against all of a corpus."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.probes.channels.activations import Activations, read_activations
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_model


def test_the_ranking_is_that_of_all_sequences(model, sequences, alone):
    read = read_activations(model, sequences.batches(), ("write",))
    assert list(read.values) == [("write", layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        found = read.top_sequences("write", layer, kept=5, tokens=3)
        for channel in range(CHANNELS):
            totals = {}
            for start, document, ids, routing in alone:
                gate = routing[layer].write[0, :, channel]
                totals[start] = (gate.sum().item(), len(ids), document, ids, gate)
            # Texts come again, so totals do: float32 tells equals apart by their batch.
            floor = sorted((value[0] for value in totals.values()), reverse=True)[4]
            kept = found[channel]
            assert len(kept) == 5
            assert [s.total for s in kept] == sorted((s.total for s in kept), reverse=True)
            for sequence in kept:
                total, length, document, ids, gate = totals[sequence.start]
                assert total >= floor - 1e-4
                assert sequence.total == pytest.approx(total, rel=1e-4)
                assert (sequence.length, sequence.document) == (length, document)
                best = gate.sort(descending=True).values[:3].tolist()
                assert [t.gate for t in sequence.tokens] == pytest.approx(best, rel=1e-3)
                for token in sequence.tokens:
                    place = token.position - sequence.start
                    assert token.token_id == ids[place]
                    assert token.gate == pytest.approx(gate[place].item(), rel=1e-3)


def test_sequences_by_hand():
    write = torch.tensor([0.1, 0.4, 0.1, 0.4, 0.2, 0.2, 0.1])[:, None]
    columns = (torch.tensor([20, 24]), torch.tensor([4, 3]), torch.tensor([7, 8]))
    read = Activations(torch.arange(7), *columns, {("write", 0): write})
    ((first, second),) = read.top_sequences("write", 0, kept=3, tokens=5)
    assert (first.start, first.length, first.document) == (20, 4, 7)
    assert first.total == pytest.approx(1.0)
    # The earlier of two equal gates comes first.
    assert [t.position for t in first.tokens] == [21, 23, 20, 22]
    assert [t.token_id for t in first.tokens] == [1, 3, 0, 2]
    assert second.total == pytest.approx(0.5)
    assert [t.position for t in second.tokens] == [24, 25, 26]
    with pytest.raises(InputError, match="the number of sequences kept is 0"):
        read.top_sequences("write", 0, kept=0)


def test_gates_that_are_not_finite_are_refused(corpus, sequences):
    model = make_model(len(corpus.tokenizer))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        read_activations(model, sequences.batches(), ("write",))


def test_a_layer_that_is_named_twice_is_read_once(model, sequences):
    once = read_activations(model, sequences.batches(), ("write",), iter((2,)))
    twice = read_activations(model, sequences.batches(), ("write",), (2, 2))
    assert list(twice.values) == [("write", 2)]
    assert torch.equal(twice.values["write", 2], once.values["write", 2])
    assert len(once.values["write", 2]) == len(once.tokens)
