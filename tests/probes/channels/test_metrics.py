"""Figures of channels by hand, their limits, and over a corpus against all positions at once."""

import math

import numpy as np
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.probes.channels import gate_uses
from prismlm.probes.channels.activations import read_activations, value_norms
from prismlm.probes.channels.metrics import (
    entropy,
    equal_bins,
    gate_use,
    gini,
    information,
    lag_correlation,
    measure_layers,
    quartiles,
    repetition,
    sparsity_ratio,
)
from prismlm.probes.channels.report import locality_table
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model

HAND = torch.tensor([[1.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]])


def test_figures_by_hand():
    # max 3 over mean 2; 4 over 1; 1 over 1.
    assert sparsity_ratio(HAND).tolist() == [1.5, 4.0, 1.0]
    # Ascending 1 2 2 3 with weights 4 3 2 1: 17, so (5 − 34/8) / 4; alone: (5 − 2) / 4.
    assert gini(HAND).tolist() == [0.1875, 0.75, 0.0]
    # Shares ⅛ ¼ ⅜ ¼: ⅛·3 ln 2 + 2·¼·2 ln 2 + ⅜ (3 ln 2 − ln 3).
    first = (3 / 8 + 1 + 9 / 8) * math.log(2) - 3 / 8 * math.log(3)
    torch.testing.assert_close(
        entropy(HAND), torch.tensor([first, 0.0, math.log(4)], dtype=torch.float64)
    )


@pytest.mark.parametrize("metric", [sparsity_ratio, gini, entropy])
def test_positions_without_a_distribution_are_refused(metric):
    with pytest.raises(InputError, match="no activation at all"):
        metric(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    with pytest.raises(InputError, match="not finite"):
        metric(torch.tensor([[math.nan, 1.0]]))


def test_equal_bins_by_hand():
    values = np.array([4.0, 1.0, 3.0, 2.0])
    assert equal_bins(values, 2).tolist() == [1, 0, 1, 0]
    assert equal_bins(values, 4).tolist() == [3, 0, 2, 1]
    # The edge belongs to the bin below it, and so do all that equal it.
    assert equal_bins(np.array([0.0, 0.0, 0.0, 1.0]), 2).tolist() == [0, 0, 0, 1]


def test_information_by_hand():
    # Channel 0 says which token it is, channel 1 nothing, channel 2 something.
    tokens = torch.tensor([0, 0, 7, 7])
    values = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9]])
    found, corrected = information(tokens, values, bins=2)
    # ln 2 + H(¾, ¼) − H(½, ¼, ¼).
    ln2, ln3 = math.log(2), math.log(3)
    expected = [ln2, 0, ln2 + (2 * ln2 - 0.75 * ln3) - 1.5 * ln2]
    assert found == pytest.approx(expected)
    # Pairs seen: 2, 4 and 3; tokens and bins 2 each; n = 4.
    assert corrected - found == pytest.approx([1 / 8, -1 / 8, 0.0])


# Two tokens that each use one channel alone and together use both; a third that is undecided.
GATE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
UNEVEN = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]])


def close(use, *expected):
    assert list(use.values()) == pytest.approx(list(expected), abs=1e-7)


def test_gate_use_by_hand():
    # G is 1/2, 1/2 and 0 of the tokens, and 0 of their mean (½, ½); the largest are 1, 1 and ½.
    close(gate_use(GATE), 1 / 3, 0.0, 5 / 6, 0.5)
    # Ascending 1 1 1 7 by weights 4 3 2 1: 16 tenths, (5 − 3.2) / 4 = 0.45; 1 1 4 4: 19 tenths,
    # (5 − 3.8) / 4 = 0.3; their mean .1 .1 .25 .55: .4 + .3 + .5 + .55 = 1.75, (5 − 3.5) / 4.
    close(gate_use(UNEVEN), (0.45 + 0.3) / 2, 0.375, 0.55, 0.55)
    assert gate_use(UNEVEN[:1]) == gate_use(UNEVEN[:1][:, [3, 1, 0, 2]])


def test_groups_are_measured_one_by_one():
    # Beside the group above stands one where each token uses a channel alone: G is 3/4 of tokens,
    # and (5 − 2 (1 + ½)) / 4 = 1/2 of their mean ½ ½ 0 0; the largest are 1, and ½ of the mean.
    both = torch.cat([UNEVEN, torch.eye(4)[:2]], 1)
    close(gate_use(both, groups=2), (0.375 + 0.75) / 2, (0.375 + 0.5) / 2, 0.775, 0.525)
    assert gate_use(both[:, [4, 5, 6, 7, 0, 1, 2, 3]], groups=2) == gate_use(both, groups=2)


def test_the_limits():
    close(gate_use(torch.full((3, 8), 1 / 8)), 0.0, 0.0, 1 / 8, 1 / 8)
    close(gate_use(torch.eye(8)[[2, 2, 2]]), 7 / 8, 7 / 8, 1.0, 1.0)


@pytest.mark.parametrize("groups", [1, 2])
def test_over_a_corpus_tokens_weigh_alike_and_padding_nothing(tiny_corpus, groups):
    corpus = Corpus.open(tiny_corpus)
    torch.manual_seed(0)
    size = 8 // groups
    settings = {
        "preset": "protot-tiny",
        "hidden_size": 32,
        "num_channels": 8,
        "num_groups": groups,
        "dropout": 0.5,
    }
    model = build_model(build_config(settings, len(corpus.tokenizer), corpus.eos_token_id))
    model.train()
    sequences = Sequences(corpus, length=48, max_tokens=2000)
    found = gate_uses(model, sequences.batches())
    assert model.training
    assert gate_uses(model, sequences.batches()) == found, "without dropout"
    assert found[0]["read"] == found[0]["write"], "shared gates"
    assert found[1]["read"] != found[1]["write"]
    model.eval()
    for kind in ("write", "read"):
        for layer, metrics in zip(found, measure_layers(model, sequences, kind), strict=True):
            use = layer[kind]
            assert layer["tokens"] == metrics["positions"]
            assert use["gini"] == pytest.approx(metrics["gini"], rel=1e-6)
            assert 1 / size <= use["top_channel_share"] <= use["top_share"] <= 1
            assert use["use_gini"] <= use["gini"]
            assert use["top_share"] == pytest.approx(metrics["sparsity_ratio"] / size, rel=1e-5)


VOCABULARY = 50


@pytest.mark.parametrize("kind", ["write", "read"])
def test_measures_are_those_of_all_positions(model, sequences, alone, kind):
    found = measure_layers(model, sequences, kind)
    assert [m["layer"] for m in found] == list(range(LAYERS))
    for layer, metrics in enumerate(found):
        gates = torch.cat([getattr(routing[layer], kind)[0] for *_, routing in alone])
        assert metrics["positions"] == len(gates)
        assert metrics["sparsity_ratio"] == pytest.approx(sparsity_ratio(gates).mean().item(), 1e-4)
        assert metrics["gini"] == pytest.approx(gini(gates).mean().item(), 1e-4)
        assert metrics["entropy"] == pytest.approx(entropy(gates).mean().item(), 1e-4)
        ids = torch.cat([row for _, _, row, _ in alone])
        expected = information(ids, gates)[0].mean()
        assert metrics["mutual_information"] == pytest.approx(expected, rel=0.02)
        assert 0 < metrics["mutual_information"] <= math.log(8) + 1e-9
    # What layer 0 writes follows from the token alone.
    assert found[0]["mutual_information"] > found[2]["mutual_information"]
    assert found[2]["mutual_information_corrected"] < found[2]["mutual_information"]


def test_heads_of_llama_are_measured_alike(corpus, sequences):
    llama = make_llama(len(corpus.tokenizer), kv_heads=4)
    found = measure_layers(llama, sequences, "values")
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


def test_what_cannot_be_measured_is_refused(corpus, model, sequences):
    llama = make_llama(len(corpus.tokenizer))
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        measure_layers(llama, sequences, "write")
    with pytest.raises(InputError, match="no value projections"):
        measure_layers(model, sequences, "values")
    with pytest.raises(InputError, match="Did you mean 'values'"):
        measure_layers(model, sequences, "value")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no layer 9"):
        read_activations(model, sequences.batches(), ("write",), layers=[9])


def test_figures_of_groups_are_those_of_each_group(corpus, sequences):
    model = make_model(len(corpus.tokenizer), num_groups=3)
    read = read_activations(model, sequences.batches(), ("write",))
    for layer, found in enumerate(measure_layers(model, sequences)):
        groups = read.values["write", layer].chunk(3, 1)
        assert found["width"] == CHANNELS // 3
        for name, figure in (
            ("gini", gini),
            ("entropy", entropy),
            ("sparsity_ratio", sparsity_ratio),
        ):
            means = [figure(group).mean().item() for group in groups]
            assert found[name] == pytest.approx(sum(means) / 3)


def test_cross_correlation_by_hand():
    # Minus their means: read 1 −1 0 0, write 0 1 −1 0.
    write, read = torch.tensor([[2.0], [3], [1], [2]]), torch.tensor([[3.0], [1], [2], [2]])
    found = lag_correlation(write, read, [4], max_lag=2, shuffles=2)
    assert found.lags.tolist() == [-2, -1, 0, 1, 2]
    # ℓ = 1: r_0 w_1 + r_1 w_2 = 2, ℓ = 0: r_1 w_1 = −1, ℓ = 2: r_0 w_2 = −1; both energies are 2.
    torch.testing.assert_close(
        found.correlation, torch.tensor([[0.0, 0.0, -0.5, 1.0, -0.5]], dtype=torch.float64)
    )
    assert found.peak.tolist() == [1]


def random_gates(count, length, channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(length + 3 * i, channels, generator=generator) for i in range(count)]


def test_a_read_before_each_write_peaks_at_one_and_unrelated_gates_do_not():
    writes, noise, reads = random_gates(6, 40, 3), random_gates(6, 40, 3, seed=9), []
    for write, other in zip(writes, noise, strict=True):
        read = torch.cat([write[1:], write[:1]]) + 0.1 * other
        read[:, 2] = other[:, 2]
        write[:, 1] = torch.roll(read[:, 1], -2)
        reads.append(read)
    found = lag_correlation(torch.cat(writes), torch.cat(reads), list(map(len, writes)), seed=1)
    # Channel 1 is written two positions before it is read.
    assert found.peak.tolist()[:2] == [1, -2]
    assert found.p.tolist()[:2] == [0.01, 0.01]
    assert found.correlation[:2].amax(1).min() > 0.9
    assert found.p[2] > 0.01
    assert found.null_mean.abs().max() < 0.05
    # Of n independent pairs the standard deviation is about 1/√n, here n = 285.
    assert found.null_deviation.mean().item() == pytest.approx(285**-0.5, rel=0.15)


def test_a_gate_that_never_varies_has_no_correlation():
    (write,) = random_gates(1, 30, 2)
    write[:, 0] = 0.1
    found = lag_correlation(write, random_gates(1, 30, 2, seed=4)[0], [30])
    assert found.correlation.isnan().any(1).tolist() == [True, False]
    assert found.p.isnan().tolist() == [True, False]


def report(lives, repetitions):
    pairs = zip(lives, repetitions, strict=True)
    return [{"half_life": life, "repetition": repetition} for life, repetition in pairs]


def test_what_has_no_ranks_says_why():
    alike = locality_table(report([13.5] * 3, [0.1, 0.2, 0.3]))
    assert "rho" not in alike.facts
    assert alike["no_rho"] == "the half-life is one figure 3 times: it has no ranks."
    assert "decay alike" in alike["no_quartiles"]
    few = locality_table(report([1.0, 2.0], [0.1, 0.2]))
    assert "rho" not in few.facts
    assert "3 pairs" in few["no_rho"]


def test_quartiles_by_hand():
    lives = np.array([8.0, 1, 2, 3, 4, 5, 6, 7])
    scores = np.array([0.3, 0.9, 0.7, 0.6, 0.5, 0.5, 0.4, 0.1])
    found = quartiles(lives, scores)
    assert found["bounds"] == [2.75, 4.5, 6.25]
    assert found["counts"] == [2, 2, 2, 2]
    assert found["means"] == pytest.approx([0.8, 0.55, 0.45, 0.2])
    # Both groups lie 0.1 around their means: Σ squares 0.04 over 2 degrees of freedom.
    assert found["cohens_d"] == pytest.approx(0.6 / math.sqrt(0.02), rel=1e-5)


def test_quartiles_of_channels_that_decay_alike_are_refused():
    with pytest.raises(InputError, match="decay alike"):
        quartiles(np.full(8, 13.5), np.arange(8.0))
    with pytest.raises(InputError, match="no unit"):
        quartiles(np.arange(8.0), np.full(8, 0.5))
    # The mean of three tenths is not .1 in float64.
    scores = np.array([0.1] * 3 + [0.2] * 6 + [0.0] * 3)
    with pytest.raises(InputError, match="no unit"):
        quartiles(np.arange(12.0), scores)


def test_repetition_by_hand():
    # Two distinct of four, and six of six.
    assert repetition([5, 5, 6, 5]) == 0.5
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
