"""Figures of channels by hand and over a corpus; the report is what the functions behind it say."""

import json
import math

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.decoders.protot import half_lives
from prismlm.probes.channels.activations import read_activations, value_norms
from prismlm.probes.channels.report import (
    channel_report,
    entropy,
    gini,
    lag_correlation,
    locality_table,
    measure_layers,
    mutual_information,
    sparsity_ratio,
)
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model
from tests.helpers.token_corpus import excerpt

HAND = torch.tensor([[1.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]])


def test_figures_by_hand():
    # max 3 over mean 2; 4 over 1; 1 over 1.
    assert sparsity_ratio(HAND).tolist() == [1.5, 4.0, 1.0]
    # Ascending 1 2 2 3 with weights 4 3 2 1: 17, so (5 − 34/8) / 4; alone: (5 − 2) / 4.
    assert gini(HAND).tolist() == [0.1875, 0.75, 0.0]
    # Shares ⅛ ¼ ⅜ ¼: ⅛·3 ln 2 + 2·¼·2 ln 2 + ⅜ (3 ln 2 − ln 3).
    first = (3 / 8 + 1 + 9 / 8) * math.log(2) - 3 / 8 * math.log(3)
    assert entropy(HAND).tolist() == pytest.approx([first, 0, math.log(4)])


def test_information_by_hand():
    # Channel 0 says which token it is, channel 1 nothing, channel 2 something.
    tokens = torch.tensor([0, 0, 7, 7])
    values = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9]])
    result, corrected = mutual_information(tokens, values, bins=2)
    # ln 2 + H(¾, ¼) − H(½, ¼, ¼).
    ln2, ln3 = math.log(2), math.log(3)
    expected = [ln2, 0, ln2 + (2 * ln2 - 0.75 * ln3) - 1.5 * ln2]
    assert result == pytest.approx(expected)
    # Pairs seen: 2, 4 and 3; tokens and bins 2 each; n = 4.
    assert corrected - result == pytest.approx([1 / 8, -1 / 8, 0.0])


@pytest.mark.parametrize("kind", ["write", "read"])
def test_measures_are_those_of_all_positions(corpus, model, sequences, alone, kind):
    result = measure_layers(model, sequences, kind)
    assert [m["layer"] for m in result] == list(range(LAYERS))
    for layer, metrics in enumerate(result):
        gates = torch.cat([getattr(routing[layer], kind)[0] for *_, routing in alone])
        assert metrics["positions"] == len(gates)
        figures = {"sparsity_ratio": sparsity_ratio, "gini": gini, "entropy": entropy}
        for name, figure in figures.items():
            assert metrics[name] == pytest.approx(figure(gates).mean().item(), 1e-4)
        ids = torch.cat([row for _, _, row, _ in alone])
        expected = mutual_information(ids, gates)[0].mean()
        assert metrics["mutual_information"] == pytest.approx(expected, rel=0.02)
        assert 0 < metrics["mutual_information"] <= math.log(8) + 1e-9
    # What layer 0 writes follows from the token alone.
    assert result[0]["mutual_information"] > result[2]["mutual_information"]
    assert result[2]["mutual_information_corrected"] < result[2]["mutual_information"]
    # Groups of channels are measured separately.
    model = make_model(len(corpus.tokenizer), num_groups=2)
    activations = read_activations(model, sequences, (kind,)).values
    for layer, metrics in enumerate(measure_layers(model, sequences, kind)):
        parts = activations[kind, layer].chunk(2, dim=1)
        assert metrics["width"] == CHANNELS // 2
        expected = sum(gini(part).mean().item() for part in parts) / 2
        assert metrics["gini"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_value_norms_are_those_of_the_value_heads(kv_heads):
    llama = make_llama(50, kv_heads)
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    result = value_norms(llama, ids)
    assert [norms.shape for norms in result] == [(2, 9, kv_heads)] * 2
    states = llama(ids, output_hidden_states=True).hidden_states
    for layer, norms in zip(llama.model.layers, result, strict=True):
        values = layer.self_attn.v_proj(layer.input_layernorm(states[layer.self_attn.layer_idx]))
        heads = values.reshape(2, 9, kv_heads, 6)
        torch.testing.assert_close(norms, heads.square().sum(-1).sqrt())
        assert not layer.self_attn.v_proj._forward_hooks


def test_cross_correlation_by_hand():
    # Minus their means: read 1 −1 0 0, write 0 1 −1 0.
    write, read = torch.tensor([[2.0], [3], [1], [2]]), torch.tensor([[3.0], [1], [2], [2]])
    result = lag_correlation(write, read, [4], max_lag=2, shuffles=2)
    assert result["lags"].tolist() == [-2, -1, 0, 1, 2]
    # ℓ = 1: r_0 w_1 + r_1 w_2 = 2, ℓ = 0: r_1 w_1 = −1, ℓ = 2: r_0 w_2 = −1; both energies are 2.
    assert result["correlation"].tolist() == [pytest.approx([0, 0, -0.5, 1, -0.5])]
    assert result["peak"].tolist() == [1]


def test_a_read_before_each_write_peaks_at_one_and_unrelated_gates_do_not():
    writes, noise = (
        [torch.rand(length, 3, generator=generator) for length in range(40, 58, 3)]
        for generator in (torch.Generator().manual_seed(seed) for seed in (0, 9))
    )
    reads = []
    for write, other in zip(writes, noise, strict=True):
        read = torch.cat([write[1:], write[:1]]) + 0.1 * other
        read[:, 2] = other[:, 2]
        write[:, 1] = torch.roll(read[:, 1], -2)
        reads.append(read)
    result = lag_correlation(torch.cat(writes), torch.cat(reads), list(map(len, writes)), seed=1)
    # Channel 1 is written two positions before it is read.
    assert result["peak"].tolist()[:2] == [1, -2]
    assert result["p"].tolist()[:2] == [0.01, 0.01]
    assert result["correlation"][:2].amax(1).min() > 0.9
    assert result["p"][2] > 0.01


def test_quartiles_by_hand():
    pairs = zip([8.0, 1, 2, 3, 4, 5, 6, 7], [0.3, 0.9, 0.7, 0.6, 0.5, 0.5, 0.4, 0.1], strict=True)
    channels = [{"half_life": life, "repetition": repetition} for life, repetition in pairs]
    table = locality_table(channels)
    assert [row["half_life_to"] for row in table.rows] == [2.75, 4.5, 6.25, 8]
    assert [row["channels"] for row in table.rows] == [2, 2, 2, 2]
    means = [row["repetition"] for row in table.rows]
    assert means == pytest.approx([0.8, 0.55, 0.45, 0.2])
    # Both groups lie 0.1 around their means: Σ squares 0.04 over 2 degrees of freedom.
    assert table["cohens_d"] == pytest.approx(0.6 / math.sqrt(0.02), rel=1e-5)
    assert table["rho"] < -0.9
    assert locality_table(channels[:3]).rows == ()
    equal = locality_table([channel | {"half_life": 2.0} for channel in channels])
    assert ([row["channels"] for row in equal.rows], equal["rho"], equal["p"]) == ([8], 0, 1)
    assert "cohens_d" not in equal.facts


TEXT = "Old maps — 日本, the river."


@pytest.mark.parametrize("settings", [{}, {"decay_mode": "token"}])
def test_figures_are_those_of_the_functions(corpus, sequences, settings):
    model = make_model(len(corpus.tokenizer), **settings)
    lives_of = [[None] * CHANNELS] * LAYERS
    if not settings:
        lives_of = [lives.tolist() for lives in half_lives(model)]
    report = channel_report(model, corpus.tokenizer, sequences)
    assert report.of == "channels"
    assert bool(report.locality.rows) == (not settings)
    for kind in ("write", "read"):
        expected = measure_layers(model, sequences, kind)
        assert tuple(layer.metrics[kind] for layer in report.layers) == expected
    read = read_activations(model, sequences, ("write", "read"))
    for layer, lives in zip(report.layers, lives_of, strict=True):
        assert [c["half_life"] for c in layer.channels] == lives
        ranked = read.top_sequences("write", layer.layer)
        for channel, best in zip(layer.channels, ranked, strict=True):
            assert [row["total"] for row in channel["sequences"]] == [s["total"] for s in best]
            ids = [token["token_id"] for sequence in best for token in sequence["tokens"]]
            assert channel["repetition"] == 1 - len(set(ids)) / len(ids)
        if layer.shared_gates:
            assert layer.lags["peak"].tolist() == [0] * CHANNELS
    assert [layer.shared_gates for layer in report.layers] == [True, False, False]


def test_passages_and_top_tokens_are_the_corpus(corpus, model, sequences):
    report = channel_report(model, corpus.tokenizer, sequences, text=TEXT, name="tiny")
    for channel in (channel for layer in report.layers for channel in layer.channels):
        gates = {}
        for sequence in channel["sequences"]:
            start, length = sequence["position"], sequence["length"]
            passage = report.passages[start]
            assert "".join(passage.text.words) == sequence["text"] == excerpt(corpus, start, length)
            number = corpus.document_at(start)
            assert sequence["doc_id"] == corpus.doc_ids[number] == passage.document["doc_id"]
            assert passage.offset == start - corpus.starts[number]
            for token in sequence["tokens"]:
                gates.setdefault(token["token_id"], []).append(token["gate"])
        sums = [t["count"] * t["gate"] for t in channel["tokens"]]
        assert sums == sorted(sums, reverse=True)
        assert {token["token_id"] for token in channel["tokens"]} == set(gates)
        for token in channel["tokens"]:
            number, own = token["token_id"], gates[token["token_id"]]
            assert (token["count"], token["gate"]) == (len(own), pytest.approx(sum(own) / len(own)))
            at_end = number == corpus.eos_token_id and token["text"] == ""
            assert at_end or token["text"] == corpus.tokenizer.decode([number])


def test_a_text_needs_no_corpus(corpus, model):
    result = channel_report(model, corpus.tokenizer, text=TEXT)
    assert (result.corpus, result.locality, result.passages, result.tables) == (None, None, {}, ())
    channel = result.layers[1].channels[0]
    assert (channel["repetition"], channel["tokens"], channel["sequences"]) == (None, [], [])
    assert channel["half_life"] == half_lives(model)[1][0].item()
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_llama_has_figures_of_its_heads_and_no_channels(corpus, model, sequences):
    llama = make_llama(len(corpus.tokenizer), kv_heads=4)
    result = channel_report(llama, corpus.tokenizer, sequences, name="llama")
    assert result.of == "heads"
    expected = measure_layers(llama, sequences, "values")
    assert tuple(layer.metrics["values"] for layer in result.layers) == expected
    assert expected[0]["width"] == 4
    assert all(layer.channels == () and layer.lags is None for layer in result.layers)
    json.dumps(result.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        channel_report(llama, corpus.tokenizer, text=TEXT)
    with pytest.raises(InputError, match="no value projections"):
        measure_layers(model, sequences, "values")
