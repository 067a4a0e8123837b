"""How evenly gates spread, by hand and over batches of a corpus."""

import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.instruments.channels import gate_uses
from prismlm.instruments.channels.metrics import GateUse, gate_use, measure_layers
from prismlm.models.presets import build_config, build_model

# Two tokens that each use one channel alone and together use both; a third that is undecided.
GATE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
UNEVEN = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]])


def close(use, *expected):
    assert [use.gini, use.use_gini, use.top_share, use.top_channel_share] == pytest.approx(
        list(expected), abs=1e-7
    )


def test_figures_by_hand():
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
