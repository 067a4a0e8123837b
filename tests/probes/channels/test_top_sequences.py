"""The sequences in which a channel writes most, against all of a corpus."""

import math

import pytest
import torch

from prismlm.corpus.windows import WindowBatch
from prismlm.errors import InputError
from prismlm.probes.channels.metrics import repetition
from prismlm.probes.channels.top_sequences import TopSequences, rank_sequences
from tests.helpers.mixer_models import CHANNELS, LAYERS


def test_the_ranking_is_that_of_all_sequences(model, sequences, alone):
    found = rank_sequences(model, sequences, kept=5, tokens=3)
    assert sorted(found) == list(range(LAYERS))
    for layer in range(LAYERS):
        for channel in range(CHANNELS):
            totals = {}
            for start, document, ids, routing in alone:
                gate = routing[layer].write[0, :, channel]
                totals[start] = (gate.sum().item(), len(ids), document, ids, gate)
            # Texts come again, so totals do: float32 tells equals apart by their batch.
            floor = sorted((value[0] for value in totals.values()), reverse=True)[4]
            kept = found[layer].sequences(channel)
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
    scores = repetition(found[1].tokens)
    assert scores.shape == (CHANNELS,)
    assert ((scores >= 0) & (scores < 1)).all()


def batch_of(write, first):
    """Write gates of sequences of four tokens, the second of three, as a batch."""
    rows = len(write)
    owned = torch.ones(rows, 4, dtype=torch.bool)
    owned[1:2, 3] = False
    positions = torch.arange(first, first + 4 * rows).reshape(rows, 4)
    return WindowBatch(
        positions % 10, owned, owned, torch.where(owned, positions, -1), torch.arange(rows)
    )


def test_candidates_by_hand():
    write = torch.tensor([[[0.1], [0.4], [0.1], [0.3]], [[0.2], [0.2], [0.1], [9.0]]])
    found = TopSequences(3, 5)
    found.add(write, batch_of(write, 20))
    first, second = found.sequences(0)
    assert (first.start, first.length, first.document) == (20, 4, 0)
    assert first.total == pytest.approx(0.9)
    # The earlier of two equal gates comes first; what is beyond the end takes no part.
    assert [t.position for t in first.tokens] == [21, 23, 20, 22]
    assert [t.token_id for t in first.tokens] == [1, 3, 0, 2]
    assert second.total == pytest.approx(0.5)
    assert [t.position for t in second.tokens] == [24, 25, 26]
    with pytest.raises(InputError, match="no channel 1 in layer 7"):
        found.sequences(1, layer=7)
    with pytest.raises(InputError, match="not finite"):
        found.add(write * math.nan, batch_of(write, 20))
