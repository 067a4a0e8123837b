"""Figures of channels by hand, their limits, and over a corpus against all positions at once."""

import math

import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.probes.channels import gate_uses
from prismlm.probes.channels.metrics import (
    GateUse,
    LagTally,
    LayerTally,
    count_bins,
    entropy,
    equal_bins,
    gate_use,
    gini,
    information,
    measure_layers,
    quartiles,
    repetition,
    sparsity_ratio,
    value_norms,
)
from prismlm.probes.channels.report import Channel, LayerReport, locality_table
from prismlm.probes.channels.top_sequences import rank_sequences
from tests.helpers.lags import read_write_lags
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama

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
    sample = torch.tensor([[4.0, 0.0], [1.0, 0.0], [3.0, 0.0], [2.0, 1.0]])
    assert equal_bins(sample, 2).tolist() == [[2.0], [0.0]]
    assert equal_bins(sample, 4).tolist() == [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]


def test_information_by_hand():
    # Channel 0 says which token it is, channel 1 nothing, channel 2 something.
    edges = torch.tensor([[0.5], [0.5], [0.5]]).double()
    counts = torch.zeros(3, 3, 2, dtype=torch.int64)
    tokens = torch.tensor([0, 0, 2, 2])
    values = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9]])
    count_bins(counts, edges, tokens, values)
    # ln 2 + H(¾, ¼) − H(½, ¼, ¼).
    ln2, ln3 = math.log(2), math.log(3)
    third = ln2 + (2 * ln2 - 0.75 * ln3) - 1.5 * ln2
    expected = torch.tensor([ln2, 0.0, third], dtype=torch.float64)
    torch.testing.assert_close(information(counts), expected)
    # Pairs seen: 2, 4 and 3; tokens and bins 2 each; n = 4.
    correction = torch.tensor([1 / 8, -1 / 8, 0.0], dtype=torch.float64)
    torch.testing.assert_close(information(counts, corrected=True), expected + correction)


def test_an_edge_belongs_to_the_bin_below_it():
    counts = torch.zeros(1, 1, 3, dtype=torch.int64)
    values = torch.tensor([[0.25], [0.26], [0.5], [0.6]])
    count_bins(counts, torch.tensor([[0.25, 0.5]]).double(), torch.zeros(4).long(), values)
    assert counts.tolist() == [[[1, 2, 1]]]


def test_figures_of_groups_are_those_of_each_group():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (50,), generator=generator)
    gates = torch.randn(50, 3, 4, generator=generator).softmax(-1)
    tally = LayerTally(9, groups=3)
    tally.add(tokens, gates.flatten(1))
    found = tally.metrics(0)
    alone = []
    for group in gates.unbind(1):
        own = LayerTally(9)
        own.add(tokens, group)
        alone.append(torch.tensor(list(own.metrics(0).values())))
    assert list(found.values()) == pytest.approx(torch.stack(alone).mean(0).tolist(), rel=1e-5)
    even = LayerTally(9, groups=3)
    even.add(tokens, torch.full((50, 12), 0.25))
    assert tuple(even.metrics(0).values())[3:6] == pytest.approx((1, 0, math.log(4)))


def test_a_tally_is_the_same_in_any_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (100,), generator=generator)
    values = torch.rand(100, 4, generator=generator)
    found = []
    for sizes in ([100], [60, 40], [55, 5, 39, 1]):
        # Bins are laid by the first 60 positions, or by the batches that first reach them.
        tally = LayerTally(9, bins=3, sample=60 if len(sizes) > 1 else 100)
        for t, v in zip(tokens.split(sizes), values.split(sizes), strict=True):
            tally.add(t, v)
        found.append(tally.metrics(5))
    assert found[1] == pytest.approx(found[2])
    assert found[0]["positions"] == found[1]["positions"] == 100
    assert (found[0]["layer"], found[0]["gini"]) == (5, pytest.approx(gini(values).mean().item()))
    assert found[0]["entropy"] == pytest.approx(entropy(values).mean().item())
    assert found[0]["sparsity_ratio"] == pytest.approx(sparsity_ratio(values).mean().item())
    counts = torch.zeros(9, 4, 3, dtype=torch.int64)
    count_bins(counts, equal_bins(values, 3), tokens, values)
    assert found[0]["mutual_information"] == pytest.approx(information(counts).mean().item())


# Two tokens that each use one channel alone and together use both; a third that is undecided.
GATE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
UNEVEN = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]])


def close(use, *expected):
    assert [use.gini, use.use_gini, use.top_share, use.top_channel_share] == pytest.approx(
        list(expected), abs=1e-7
    )


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
    assert found[0].read == found[0].write, "shared gates"
    assert found[1].read != found[1].write
    model.eval()
    for kind in ("write", "read"):
        for layer, metrics in zip(found, measure_layers(model, sequences, kind), strict=True):
            use: GateUse = getattr(layer, kind)
            assert layer.tokens == metrics["positions"]
            assert use.gini == pytest.approx(metrics["gini"], rel=1e-6)
            assert 1 / size <= use.top_channel_share <= use.top_share <= 1
            assert use.use_gini <= use.gini
            assert use.top_share == pytest.approx(metrics["sparsity_ratio"] / size, rel=1e-5)


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


def test_what_cannot_be_measured_is_refused(corpus, model, sequences):
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


def test_lags_are_read_from_the_models_gates(model, sequences):
    found = read_write_lags(model, sequences, max_lag=2, shuffles=9, layers=[0, 2])
    assert sorted(found) == [0, 2]
    # Layer 0 reads by its write gate.
    assert found[0].peak.tolist() == [0] * CHANNELS
    torch.testing.assert_close(found[0].correlation[:, 2], torch.ones(CHANNELS).double())
    torch.testing.assert_close(found[0].p, torch.full((CHANNELS,), 0.1).double())
    assert (found[2].correlation[:, 2] < 0.999).all()


def test_cross_correlation_by_hand():
    tally = LagTally(1, max_lag=2, shuffles=2)
    # Minus their means: read 1 −1 0 0, write 0 1 −1 0.
    tally.add(torch.tensor([[2.0], [3], [1], [2]]), torch.tensor([[3.0], [1], [2], [2]]))
    found = tally.result()
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
    tally, noise = LagTally(3, seed=1), random_gates(6, 40, 3, seed=9)
    for write, other in zip(random_gates(6, 40, 3), noise, strict=True):
        read = torch.cat([write[1:], write[:1]]) + 0.1 * other
        read[:, 2] = other[:, 2]
        write[:, 1] = torch.roll(read[:, 1], -2)
        tally.add(write, read)
    found = tally.result()
    # Channel 1 is written two positions before it is read.
    assert found.peak.tolist()[:2] == [1, -2]
    assert found.p.tolist()[:2] == [0.01, 0.01]
    assert found.correlation[:2].amax(1).min() > 0.9
    assert found.p[2] > 0.01
    assert found.null_mean.abs().max() < 0.05
    # Of n independent pairs the standard deviation is about 1/√n, here n = 285.
    assert found.null_deviation.mean().item() == pytest.approx(285**-0.5, rel=0.15)


def test_a_gate_that_never_varies_has_no_correlation():
    tally = LagTally(2)
    (write,) = random_gates(1, 30, 2)
    write[:, 0] = 0.1
    tally.add(write, random_gates(1, 30, 2, seed=4)[0])
    found = tally.result()
    assert found.correlation.isnan().any(1).tolist() == [True, False]
    assert found.p.isnan().tolist() == [True, False]


def report(lives, repetitions):
    channels = tuple(
        Channel(number, None, life, repetition, (), ())
        for number, (life, repetition) in enumerate(zip(lives, repetitions, strict=True))
    )
    return [LayerReport(0, False, {}, None, channels)]


def test_what_has_no_ranks_says_why():
    alike = locality_table(report([13.5] * 3, [0.1, 0.2, 0.3]))
    assert "rho" not in alike.facts
    assert alike["no_rho"] == "the half-life is one figure 3 times: it has no ranks."
    assert "decay alike" in alike["no_quartiles"]
    few = locality_table(report([1.0, 2.0], [0.1, 0.2]))
    assert "rho" not in few.facts
    assert "3 pairs" in few["no_rho"]


def test_quartiles_by_hand():
    lives = torch.tensor([8.0, 1, 2, 3, 4, 5, 6, 7])
    scores = torch.tensor([0.3, 0.9, 0.7, 0.6, 0.5, 0.5, 0.4, 0.1])
    found = quartiles(lives, scores)
    assert found["bounds"] == [2.75, 4.5, 6.25]
    assert found["counts"] == [2, 2, 2, 2]
    assert found["means"] == pytest.approx([0.8, 0.55, 0.45, 0.2])
    # Both groups lie 0.1 around their means: Σ squares 0.04 over 2 degrees of freedom.
    assert found["cohens_d"] == pytest.approx(0.6 / math.sqrt(0.02), rel=1e-5)


def test_quartiles_of_channels_that_decay_alike_are_refused():
    with pytest.raises(InputError, match="decay alike"):
        quartiles(torch.full((8,), 13.5), torch.rand(8))
    with pytest.raises(InputError, match="no unit"):
        quartiles(torch.arange(8.0), torch.full((8,), 0.5))
    # The mean of three tenths is not .1 in float64.
    scores = torch.tensor([0.1] * 3 + [0.2] * 6 + [0.0] * 3, dtype=torch.float64)
    with pytest.raises(InputError, match="no unit"):
        quartiles(torch.arange(12.0), scores)


def test_repetition_by_hand():
    tokens = torch.tensor([[[5, 5, 6], [5, -1, -1]], [[1, 2, 3], [4, 5, 6]]])
    # Two distinct of four, and six of six.
    assert repetition(tokens).tolist() == [0.5, 0.0]
