"""Signal/noise attention trained, read and timed by the scripts."""

import json
import math

import pytest

from benchmarks.signal_noise_attention import measure as signal_noise_training
from benchmarks.signal_noise_attention import read as signal_noise_reading
from benchmarks.signal_noise_attention import timing as signal_noise_attention
from prismlm.corpus import Corpus
from tests.benchmarks.scripts import run
from tests.benchmarks.signal_noise_attention.two_models import TWO


@pytest.fixture
def figures(tiny_corpus, tmp_path, monkeypatch):
    """A folder of results: two models trained for a few steps, read, and small timings."""
    monkeypatch.setattr(signal_noise_training, "VARIANTS", TWO)
    monkeypatch.setattr(signal_noise_reading, "VARIANTS", TWO)
    monkeypatch.setattr(signal_noise_training, "LENGTH", 32)
    monkeypatch.setattr(signal_noise_reading, "LENGTH", 32)
    monkeypatch.setattr(signal_noise_reading, "HEAD_TOKENS", 500)
    out, work = tmp_path / "results", tmp_path / "work"
    words = [tiny_corpus, "train", "--steps", 12, "--threads", 1]
    words += ["--work", work, "--out", out / "signal_noise_attention"]
    run(signal_noise_training, monkeypatch, *words)
    run(signal_noise_training, monkeypatch, tiny_corpus, "describe", "--out", out)
    words = [
        tiny_corpus,
        work,
        "--threads",
        1,
        "--seeds",
        0,
        "--out",
        out / "signal_noise_readings",
    ]
    run(signal_noise_reading, monkeypatch, *words)
    words = ["--quick", "--rounds", 2, "--threads", 1, "--out", out / "signal_noise_attention.json"]
    run(signal_noise_attention, monkeypatch, *words)
    return out


def test_scripts_measure_what_they_say(figures, tiny_corpus, monkeypatch, capsys):
    own = json.loads((figures / "signal_noise_attention" / "ratio-pi-0.json").read_text())
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    readings = figures / "signal_noise_readings"
    reading, gpt2 = (
        json.loads((readings / f"{name}-0.json").read_text()) for name in ("ratio-pi", "gpt-2")
    )
    random = reading["untrained"]["rates"]
    assert len(random) == len(reading["spectra"]["rates"])
    assert random[0]["noise_weight"] == reading["spectra"]["rates"][0]["noise_weight"]
    assert "untrained" not in gpt2
    for noted in (own["corpus"], reading["corpus"]):
        assert noted["fingerprint"] == Corpus.open(tiny_corpus).fingerprint
    assert str(figures.parent) not in json.dumps([reading, gpt2])
    timing = json.loads((figures / "signal_noise_attention.json").read_text())
    held = [row for row in timing["parts"]["decode"]["rows"] if row["what"] == "heads"]
    assert [row["cache_ratios"]["one tensor"] for row in held] == [0.5, 0.5]
    # What is there is not measured again.
    capsys.readouterr()
    words = [tiny_corpus, "m", "--threads", 1, "--seeds", 0, "--out", readings]
    run(signal_noise_reading, monkeypatch, *words)
    assert capsys.readouterr().out.count("is there") == 2
