"""Figures of channels over a corpus, against all of its positions at once."""

import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.channels.metrics import (
    entropy,
    gini,
    measure_layers,
    sparsity_ratio,
    value_norms,
)
from prismlm.instruments.channels.top_sequences import rank_sequences
from tests.helpers.mixer_models import LAYERS, make_llama

VOCABULARY = 50


@pytest.mark.parametrize("kind", ["write", "read"])
def test_measures_are_those_of_all_positions(model, sequences, alone, kind):
    found = measure_layers(model, sequences, kind, bins=4, sample=200)
    assert [m["layer"] for m in found] == list(range(LAYERS))
    for layer, metrics in enumerate(found):
        gates = torch.cat([getattr(routing[layer], kind)[0] for *_, routing in alone])
        assert metrics["positions"] == len(gates)
        assert metrics["sparsity_ratio"] == pytest.approx(sparsity_ratio(gates).mean().item(), 1e-4)
        assert metrics["gini"] == pytest.approx(gini(gates).mean().item(), 1e-4)
        assert metrics["entropy"] == pytest.approx(entropy(gates).mean().item(), 1e-4)
        assert 0 < metrics["mutual_information"] <= math.log(4) + 1e-9
    # What layer 0 writes follows from the token alone.
    assert found[0]["mutual_information"] > found[2]["mutual_information"]
    assert found[2]["mutual_information_corrected"] < found[2]["mutual_information"]


def test_heads_of_llama_are_measured_alike(corpus, sequences):
    llama = make_llama(len(corpus.tokenizer), kv_heads=4)
    found = measure_layers(llama, sequences, "values", sample=300)
    norms = [
        value_norms(llama, batch.input_ids, batch.attention_mask)[1][batch.owned]
        for batch in sequences.batches()
    ]
    assert len(found) == 2
    assert found[1]["gini"] == pytest.approx(gini(torch.cat(norms)).mean().item())
    assert found[1]["positions"] == corpus.num_tokens
    # Values of the first layer follow from the token alone: each knows its own bin.
    assert found[0]["mutual_information"] > found[1]["mutual_information"]


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


def test_what_cannot_be_read_is_refused(corpus, model, sequences):
    llama = make_llama(len(corpus.tokenizer))
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        rank_sequences(llama, sequences)
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        measure_layers(llama, sequences, "write")
    with pytest.raises(InputError, match="no value projections"):
        measure_layers(model, sequences, "values")
    with pytest.raises(InputError, match="Did you mean 'values'"):
        measure_layers(model, sequences, "value")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no layer 9"):
        rank_sequences(model, sequences, layers=[9])
    with pytest.raises(InputError, match="the number of sequences kept is 0"):
        rank_sequences(model, sequences, kept=0)
