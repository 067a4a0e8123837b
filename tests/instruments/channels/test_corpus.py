"""Reading channels over a corpus: rankings, figures and lags against all of it at once."""

import dataclasses
import math

import pytest
import torch

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.windows import WindowBatch
from prismlm.errors import InputError
from prismlm.instruments.channels import (
    measure,
    rank_sequences,
    read_text,
    read_write_lags,
    repetition,
    sequences_of,
    value_norms,
)
from prismlm.instruments.channels.activations import activations
from prismlm.instruments.channels.metrics import entropy, gini, sparsity_ratio
from prismlm.instruments.channels.top_sequences import candidates, empty_ranking, merge_rankings
from tests.helpers.mixer_models import (
    CHANNELS,
    LAYERS,
    VOCABULARY,
    make_corpus,
    make_llama,
    make_model,
)

LENGTH = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(corpus):
    return make_model(len(corpus.tokenizer))


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


@pytest.fixture(scope="module")
def alone(corpus, model):
    """Every sequence by itself: start, document, ids, and routing of each layer."""
    found = []
    for number, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        for first in range(start, start + length, LENGTH):
            span = min(LENGTH, start + length - first)
            ids = torch.from_numpy(corpus.read_tokens(int(first), int(span)).astype("int64"))
            routing = model(ids[None], output_routing=True).routing
            found.append((int(first), number, ids, routing))
    return found


def test_groups_are_measured_one_by_one(corpus, sequences):
    grouped = make_model(len(corpus.tokenizer), num_groups=2)
    for layer in measure(grouped, sequences, "read", bins=4, sample=200):
        # No more than the 3 channels of a group can be alike, or be led by one.
        assert 1 < layer.sparsity_ratio < 3
        assert 0 < layer.entropy < math.log(3)


def test_every_token_is_read_once(corpus, sequences):
    positions = torch.cat([batch.positions[batch.owned] for batch in sequences.batches()])
    assert sorted(positions.tolist()) == list(range(corpus.num_tokens))
    few = Sequences(corpus, "all", LENGTH, max_tokens=1)
    assert len(list(few.batches())) == 1


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
            kept = sequences_of(found[layer], channel)
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
    scores = repetition(found[1])
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
    found = merge_rankings(empty_ranking(1, 3, 5), candidates(write, batch_of(write, 20), 5))
    first, second = sequences_of(found, 0)
    assert (first.start, first.length, first.document) == (20, 4, 0)
    assert first.total == pytest.approx(0.9)
    # The earlier of two equal gates comes first; what is beyond the end takes no part.
    assert [t.position for t in first.tokens] == [21, 23, 20, 22]
    assert [t.token_id for t in first.tokens] == [1, 3, 0, 2]
    assert second.total == pytest.approx(0.5)
    assert [t.position for t in second.tokens] == [24, 25, 26]
    with pytest.raises(InputError, match="no channel 1 in layer 7"):
        sequences_of(found, 1, layer=7)
    with pytest.raises(InputError, match="not finite"):
        candidates(write * math.nan, batch_of(write, 20), 5)


def test_rankings_merge_in_any_order_with_ties_by_position():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for first in range(0, 96, 16):
        # Few values, so that totals tie.
        write = torch.randint(1, 3, (4, 4, 2), generator=generator).float()
        parts.append(candidates(write, batch_of(write, first), 2))
    nothing = empty_ranking(2, 3, 2)
    forward, backward = nothing, nothing
    for part in parts:
        forward = merge_rankings(forward, part)
    for part in reversed(parts):
        backward = merge_rankings(backward, part)
    halves = [nothing, nothing]
    for i, part in enumerate(parts):
        halves[i % 2] = merge_rankings(halves[i % 2], part)
    for other in (backward, merge_rankings(*halves)):
        for a, b in zip(forward, other, strict=True):
            assert torch.equal(a, b)
    everything = sorted(
        (-t, s)
        for p in parts
        for t, s in zip(p.total[0].tolist(), p.start[0].tolist(), strict=True)
    )
    assert [(-s.total, s.start) for s in sequences_of(forward, 0)] == everything[:3]
    assert len({t for t, _ in everything}) < len(everything)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_measures_are_those_of_all_positions(model, sequences, alone, kind):
    found = measure(model, sequences, kind, bins=4, sample=200)
    assert [m.layer for m in found] == list(range(LAYERS))
    for layer, metrics in enumerate(found):
        gates = torch.cat([getattr(routing[layer], kind)[0] for *_, routing in alone])
        assert metrics.positions == len(gates)
        assert metrics.sparsity_ratio == pytest.approx(sparsity_ratio(gates).mean().item(), 1e-4)
        assert metrics.gini == pytest.approx(gini(gates).mean().item(), 1e-4)
        assert metrics.entropy == pytest.approx(entropy(gates).mean().item(), 1e-4)
        assert 0 < metrics.mutual_information <= math.log(4) + 1e-9
    # What layer 0 writes follows from the token alone.
    assert found[0].mutual_information > found[2].mutual_information
    assert found[2].mutual_information_corrected < found[2].mutual_information


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_value_norms_are_those_of_the_value_heads(kv_heads):
    llama = make_llama(VOCABULARY, kv_heads)
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    found = value_norms(llama, ids)
    assert [norms.shape for norms in found] == [(2, 9, kv_heads)] * 2
    states = llama(ids, output_hidden_states=True).hidden_states
    for layer, norms in zip(llama.model.layers, found, strict=True):
        values = layer.self_attn.v_proj(layer.input_layernorm(states[layer.self_attn.layer_idx]))
        heads = values.reshape(2, 9, kv_heads, 6)
        torch.testing.assert_close(norms, heads.square().sum(-1).sqrt())
        assert not layer.self_attn.v_proj._forward_hooks


def test_heads_of_llama_are_measured_alike(corpus, sequences):
    llama = make_llama(len(corpus.tokenizer), kv_heads=4)
    found = measure(llama, sequences, "values", sample=300)
    norms = [activations(llama, batch, "values").layers[1] for batch in sequences.batches()]
    assert len(found) == 2
    assert found[1].gini == pytest.approx(gini(torch.cat(norms)).mean().item())
    assert found[1].positions == corpus.num_tokens
    # Values of the first layer follow from the token alone: each knows its own bin.
    assert found[0].mutual_information > found[1].mutual_information


def test_lags_are_read_from_the_models_gates(model, sequences):
    found = read_write_lags(model, sequences, max_lag=2, shuffles=9, layers=[0, 2])
    assert sorted(found) == [0, 2]
    # Layer 0 reads by its write gate.
    assert found[0].peak.tolist() == [0] * CHANNELS
    torch.testing.assert_close(found[0].correlation[:, 2], torch.ones(CHANNELS).double())
    torch.testing.assert_close(found[0].p, torch.full((CHANNELS,), 0.1).double())
    assert (found[2].correlation[:, 2] < 0.999).all()


def test_a_text_is_read_with_its_tokens(corpus, model):
    text = "Old maps forgets letters in a box."
    found = read_text(model, corpus.tokenizer, text, [1])
    assert "".join(found.tokens) == text
    assert found.token_ids.tolist() == corpus.tokenizer(text)["input_ids"]
    assert found.layers[0].write.shape == (len(found.tokens), CHANNELS)
    with pytest.raises(InputError, match="the text is empty"):
        read_text(model, corpus.tokenizer, "")


def test_what_cannot_be_read_is_refused(corpus, model, sequences):
    llama = make_llama(len(corpus.tokenizer))
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        rank_sequences(llama, sequences)
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        measure(llama, sequences, "write")
    with pytest.raises(InputError, match="no value projections"):
        measure(model, sequences, "values")
    with pytest.raises(InputError, match="Did you mean 'values'"):
        measure(model, sequences, "value")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no layer 9"):
        rank_sequences(model, sequences, layers=[9])
    with pytest.raises(InputError, match="at least 1 of both"):
        rank_sequences(model, sequences, kept=0)
    with pytest.raises(InputError, match="0 tokens"):
        dataclasses.replace(sequences, length=0)
    with pytest.raises(InputError, match="max_tokens"):
        dataclasses.replace(sequences, max_tokens=0)
    with pytest.raises(InputError, match=r"no split 'held-out'.*Did you mean 'heldout'"):
        dataclasses.replace(sequences, split="held-out")  # pyright: ignore[reportArgumentType]


def test_sequences_say_how_many_tokens_they_are(corpus, sequences):
    assert sequences.tokens == corpus.num_tokens
    assert dataclasses.replace(sequences, max_tokens=7).tokens == 7
    assert dataclasses.replace(sequences, max_tokens=10**9).tokens == corpus.num_tokens
    parts = [dataclasses.replace(sequences, split=split).tokens for split in ("train", "heldout")]
    assert sum(parts) == corpus.num_tokens
