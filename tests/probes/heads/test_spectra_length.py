"""Losses by length of context, against the model's own loss and by hand."""

import json
import math

import pytest
import torch

from prismlm.corpus import Corpus, build_corpus
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.probes.heads import SpectraOptions, head_report, spectra_report
from prismlm.probes.heads.spectra import (
    _short_losses,
    context_edges,
    loss_against_length,
    token_losses,
)
from tests.helpers.head_models import make_gpt2, make_signal_noise

IDS = torch.randint(1, 37, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.mark.parametrize("make", [make_signal_noise, make_gpt2])
def test_losses_are_the_models_own(make, monkeypatch):
    model = make()
    losses = token_losses(model, IDS)
    assert losses.shape == (3, 39)
    assert losses.mean().item() == pytest.approx(model(IDS, labels=IDS).loss.item(), abs=1e-5)
    monkeypatch.setattr("prismlm.probes.heads.spectra.LOGIT_ROWS", 7)
    assert torch.allclose(token_losses(model, IDS), losses, atol=1e-6)


def test_short_losses_see_at_least_half_and_less_than_a_row():
    model = make_signal_noise()
    full, short = token_losses(model, IDS), _short_losses(model, IDS, 12)
    assert torch.allclose(short[:, :11], full[:, :11], atol=1e-5)
    for t in range(12, 40):
        # Windows start every 6 tokens; the earliest that reaches t is the one that is taken.
        start = next(s for s in range(0, 40, 6) if s + 12 > t)
        assert 6 <= t - start <= 11
        expected = token_losses(model, IDS[:, start : t + 1])[:, -1]
        assert torch.allclose(short[:, t - 1], expected, atol=1e-5)


def test_edges():
    assert context_edges(10) == (1, 2, 4, 8, 10)
    assert context_edges(70, 40) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 70)
    assert context_edges(2) == (1, 2)
    assert context_edges(20, 64) == (1, 2, 4, 8, 16, 20)


def test_buckets_are_means_over_documents(corpus):
    model = make_signal_noise(len(corpus.tokenizer))
    found = loss_against_length(
        model, corpus, length=96, trained_length=32, documents=5, split="all"
    )
    assert (found["length"], found["trained_length"], found["documents"]) == (96, 32, 5)
    lows = [bucket["low"] for bucket in found.rows]
    assert [bucket["high"] + 1 for bucket in found.rows] == [*lows[1:], 96]
    assert 32 in lows
    # All the documents drawn, read as they are.
    numbers = corpus.split("all")
    enough = numbers[corpus.lengths[numbers] >= 96]
    import numpy as np

    drawn = np.random.default_rng(0).permutation(enough)[:5]
    rows = [corpus.tokens(int(corpus.starts[i]), 96).astype(np.int64) for i in drawn]
    ids = torch.from_numpy(np.stack(rows))
    losses, short = token_losses(model, ids), _short_losses(model, ids, 32)
    for bucket in found.rows:
        at = slice(bucket["low"] - 1, bucket["high"])
        means = losses[:, at].mean(1)
        assert bucket["loss"] == pytest.approx(means.mean().item())
        assert bucket["error"] == pytest.approx(means.std().item() / math.sqrt(5))
        if bucket["low"] < 32:
            assert bucket["difference"] is None
            continue
        apart = means - short[:, at].mean(1)
        assert bucket["short_loss"] == pytest.approx(short[:, at].mean().item())
        assert bucket["difference"] == pytest.approx(apart.mean().item(), abs=1e-9)
        assert bucket["difference_error"] == pytest.approx(
            apart.std().item() / math.sqrt(5), abs=1e-9
        )


def test_without_a_trained_length_there_is_no_control(corpus):
    model = make_signal_noise(len(corpus.tokenizer)).train()
    found = loss_against_length(model, corpus, length=48, documents=1, split="all")
    assert model.training
    assert all(bucket["difference"] is None for bucket in found.rows)
    assert math.isnan(found.rows[0]["error"])
    longer = loss_against_length(
        model, corpus, length=48, trained_length=48, documents=1, split="all"
    )
    assert [b["loss"] for b in longer.rows] == [b["loss"] for b in found.rows]


def test_what_cannot_be_read_is_refused(corpus, tmp_path):
    model = make_signal_noise(len(corpus.tokenizer))
    with pytest.raises(InputError, match=r"no document of .* has 100,000 tokens: the longest has"):
        loss_against_length(model, corpus, length=100_000)
    options = SpectraOptions(context=1)
    with pytest.raises(InputError, match="the number of tokens of a window is 1"):
        spectra_report(model, Sequences(corpus), options=options)
    with pytest.raises(InputError, match="the trained length is -4"):
        spectra_report(model, Sequences(corpus), options=SpectraOptions(trained_length=-4))
    gpt2 = make_gpt2(len(corpus.tokenizer), positions=64)
    loss_against_length(gpt2, corpus, length=64, documents=1, split="all")
    with pytest.raises(InputError, match=r"window of 65 tokens, .* 64 positions"):
        loss_against_length(gpt2, corpus, length=65)
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps({"text": "One document that is not held out, of a few words."}))
    alone = build_corpus(source, tmp_path / "one", vocab_size=300)
    empty = "heldout" if not len(alone.split("heldout")) else "train"
    with pytest.raises(InputError, match=f"no documents in '{empty}'"):
        loss_against_length(model, alone, length=4, split=empty)
    for report in (head_report, spectra_report):
        with pytest.raises(InputError, match=f"no documents in '{empty}'"):
            report(model, Sequences(alone, empty))
    model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="losses are not finite"):
        loss_against_length(model, corpus, length=16, documents=1, split="all")
