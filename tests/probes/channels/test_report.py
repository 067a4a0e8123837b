"""The report is what the functions behind it say, and says why where there is nothing to say."""

import json
import math

import numpy as np
import pytest
import torch

from prismlm.corpus import build_corpus
from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.files import finite
from prismlm.models.decoders.mixers import half_lives
from prismlm.probes.channels import read_channels
from prismlm.probes.channels.activations import read_activations
from prismlm.probes.channels.metrics import (
    lag_correlation,
    measure_layers,
    quartiles,
    repetition,
)
from prismlm.probes.channels.report import ReportOptions, channel_report
from prismlm.statistics import spearman
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model

TEXT = "Old maps — 日本, the river."
OPTIONS = ReportOptions(kept=4, tokens=7, max_lag=2, shuffles=9)


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", 16)


@pytest.fixture(scope="module")
def report(corpus, model, sequences):
    return channel_report(
        model, corpus.tokenizer, sequences, text=TEXT, name="tiny", options=OPTIONS
    )


@pytest.mark.parametrize("settings", [{}, {"num_groups": 2}, {"decay_mode": "token"}])
def test_figures_are_those_of_the_functions(corpus, sequences, settings):
    model = make_model(len(corpus.tokenizer), **settings)
    groups = settings.get("num_groups", 1)
    lives_of = [[None] * CHANNELS] * LAYERS
    if "decay_mode" not in settings:
        lives_of = [lives.tolist() for lives in half_lives(model)]
    report = channel_report(model, corpus.tokenizer, sequences, options=OPTIONS)
    assert report.of == "channels"
    assert [layer.layer for layer in report.layers] == list(range(LAYERS))
    for kind in ("write", "read"):
        expected = measure_layers(model, sequences, kind)
        assert tuple(layer.metrics[kind] for layer in report.layers) == expected
    metrics = report.layers[1].metrics["write"]
    assert metrics["width"] == CHANNELS // groups
    share = metrics["entropy"] / math.log(CHANNELS // groups)
    assert metrics["entropy_share"] == pytest.approx(share)
    read = read_activations(model, sequences.batches(), ("write", "read"))
    for layer, lives in zip(report.layers, lives_of, strict=True):
        assert [c["half_life"] for c in layer.channels] == lives
        ranked = read.top_sequences("write", layer.layer, kept=4, tokens=7)
        for channel, best in zip(layer.channels, ranked, strict=True):
            for row, sequence in zip(channel["sequences"], best, strict=True):
                assert row["position"] == sequence.start
                assert row["total"] == sequence.total
                assert [t["gate"] for t in row["tokens"]] == [t.gate for t in sequence.tokens]
            ids = [token.token_id for sequence in best for token in sequence.tokens]
            assert channel["repetition"] == repetition(ids)
        gates = (read.values[kind, layer.layer] for kind in ("write", "read"))
        lags = lag_correlation(*gates, read.lengths.tolist(), max_lag=2, shuffles=9)
        assert layer.lags is not None
        for name, column in vars(layer.lags).items():
            torch.testing.assert_close(column, getattr(lags, name))
        if layer.shared_gates:
            assert layer.lags.peak.tolist() == [0] * CHANNELS
    assert [layer.shared_gates for layer in report.layers] == [True, False, False]


def test_locality_is_over_all_channels(report):
    channels = [channel for layer in report.layers for channel in layer.channels]
    lives = np.array([c["half_life"] for c in channels])
    scores = np.array([c["repetition"] for c in channels])
    expected, groups = spearman(lives, scores), quartiles(lives, scores)
    facts = (LAYERS * CHANNELS, expected.rho, expected.p, groups["cohens_d"])
    assert tuple(report.locality.facts.values()) == facts
    assert [row["repetition"] for row in report.locality.rows] == groups["means"]
    assert [row["half_life_to"] for row in report.locality.rows[:3]] == groups["bounds"]


def test_passages_and_top_tokens_are_the_corpus(corpus, report):
    assert report.passages
    for layer in report.layers:
        for channel in layer.channels:
            tallied = {}
            for sequence in channel["sequences"]:
                start, length = sequence["position"], sequence["length"]
                passage = report.passages[start]
                assert "".join(passage.text.words) == sequence["text"]
                assert sequence["text"] == corpus.excerpt(start, length)
                assert len(passage.text.tokens) == length
                number = corpus.document_at(start)
                assert sequence["doc_id"] == corpus.doc_ids[number] == passage.document.doc_id
                assert passage.offset == start - corpus.starts[number]
                for token in sequence["tokens"]:
                    tallied.setdefault(token["token_id"], []).append(token["gate"])
            assert {t["token_id"]: t["count"] for t in channel["tokens"]} == {
                token: len(gates) for token, gates in tallied.items()
            }
            sums = [t["count"] * t["gate"] for t in channel["tokens"]]
            assert sums == sorted(sums, reverse=True)
            for token in channel["tokens"]:
                number, text = token["token_id"], token["text"]
                assert token["gate"] == pytest.approx(sum(tallied[number]) / len(tallied[number]))
                at_end = number == corpus.eos_token_id and text == ""
                assert at_end or text == corpus.tokenizer.decode([number])


def test_json_holds_everything_and_no_nan(report):
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [len(layer["channels"]) for layer in value["layers"]] == [CHANNELS] * LAYERS
    channel = value["layers"][2]["channels"][1]
    assert set(channel) == {"channel", "decay", "half_life", "repetition", "tokens", "sequences"}
    assert len(channel["sequences"]) == 4
    first = channel["sequences"][0]
    assert all(token["text"] in first["text"] for token in first["tokens"])
    assert len(value["layers"][2]["lags"]["correlation"]) == CHANNELS
    assert value["corpus"]["positions"] == value["layers"][0]["metrics"]["write"]["positions"]
    assert len(value["text"]["layers"][0]["write"]) == len(value["text"]["tokens"])
    assert finite({"a": [math.nan, (1.0, math.inf)]}) == {"a": [None, [1.0, None]]}


def test_a_text_needs_no_corpus(corpus, model):
    found = channel_report(model, corpus.tokenizer, text=TEXT)
    assert found.corpus is None
    assert found.locality is None
    assert found.passages == {}
    channel = found.layers[1].channels[0]
    assert (channel["repetition"], channel["tokens"], channel["sequences"]) == (None, [], [])
    assert channel["half_life"] == half_lives(model)[1][0].item()
    assert found.layers[1].metrics == {}
    assert found.tables == ()
    json.dumps(found.to_dict(), allow_nan=False)


def test_decays_by_token_leave_out_half_lives_and_nothing_else(corpus, sequences):
    by_token = make_model(len(corpus.tokenizer), decay_mode="token")
    found = channel_report(by_token, corpus.tokenizer, sequences, text=TEXT, options=OPTIONS)
    assert found.locality.rows == ()
    assert set(found.locality.facts) == {"no_rho", "no_quartiles"}
    for reason in found.locality.facts.values():
        assert "decays depend on the token" in reason
    ids = torch.tensor(corpus.tokenizer(TEXT)["input_ids"])
    for mine, other in zip(found.text.curves, read_channels(by_token, ids), strict=True):
        torch.testing.assert_close(mine.memory(1), other.memory(1))
    value = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    channel = value["layers"][1]["channels"][2]
    assert channel["half_life"] is None
    assert channel["decay"] is None
    assert len(channel["sequences"]) == 4


def test_medians_of_lags(report):
    lags = report.layers[2].lags
    row = report.lags.row(layer=2)
    assert row["at_lag_1"] == torch.median(lags.correlation[:, 3]).item()
    assert row["deviation"] == torch.median(lags.null_deviation[:, 3]).item()
    assert row["clear"] == row["read_first"] + row["at_once"] + row["written_first"]


def test_a_llama_has_figures_of_its_heads_and_no_channels(corpus, sequences):
    llama = make_llama(len(corpus.tokenizer), kv_heads=4)
    found = channel_report(llama, corpus.tokenizer, sequences, name="llama")
    assert found.of == "heads"
    expected = measure_layers(llama, sequences, "values")
    assert tuple(layer.metrics["values"] for layer in found.layers) == expected
    assert expected[0]["width"] == 4
    assert all(layer.channels == () and layer.lags is None for layer in found.layers)
    assert found.corpus.positions == corpus.num_tokens
    json.dumps(found.to_dict(), allow_nan=False)
    one = channel_report(llama, corpus.tokenizer, sequences, options=ReportOptions(layers=(1,)))
    assert [layer.layer for layer in one.layers] == [1]
    with pytest.raises(InputError, match="no layer 5"):
        channel_report(llama, corpus.tokenizer, sequences, options=ReportOptions(layers=(5,)))
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        channel_report(llama, corpus.tokenizer, sequences, text=TEXT)
    with pytest.raises(InputError, match="'llama' has no prototype mixer"):
        channel_report(llama, corpus.tokenizer)


def test_a_corpus_of_another_tokenizer_is_refused(corpus, model, tmp_path):
    source = tmp_path / "other.jsonl"
    source.write_text(json.dumps({"text": "quite another text " * 20}) + "\n")
    other = build_corpus(source, tmp_path / "other", vocab_size=280)
    with pytest.raises(InputError, match="another tokenizer than that of the model tiny"):
        channel_report(model, corpus.tokenizer, Sequences(other, "all"), name="tiny")
