"""Signal/noise attention trained, read and timed by the scripts, and the page of all three."""

import json
import math

import pytest

from benchmarks.signal_noise_attention import measure as signal_noise_training
from benchmarks.signal_noise_attention import read as signal_noise_reading
from benchmarks.signal_noise_attention import render as render_signal_noise_attention
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


def test_the_page_is_what_the_scripts_measured(figures, tiny_corpus, monkeypatch, capsys):
    assert run(render_signal_noise_attention, monkeypatch, "--results", figures) == 0
    page = (figures / "signal_noise_attention.md").read_text(encoding="utf-8")
    own, other = (
        json.loads((figures / "signal_noise_attention" / f"{name}-0.json").read_text())
        for name in ("ratio-pi", "gpt-2")
    )
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    assert f"| ratio π | {own['ce']:.4f} |  | 0 | {own['parameters']:,} |" in page
    row = f"| GPT-2 | {other['ce']:.4f} | {other['ce'] - own['ce']:+.4f} | 0 |"
    assert row in page

    reading = json.loads((figures / "signal_noise_readings" / "ratio-pi-0.json").read_text())
    layer = reading["spectra"]["rates"][0]
    assert f"| ratio π | {layer['before']['difference']:.4g} | {layer['gain']:.4g} (" in page
    gpt2 = json.loads((figures / "signal_noise_readings" / "gpt-2-0.json").read_text())
    heads = gpt2["heads"]["uses"]["heads"]
    shares = [head["first_share"] / (1 - head["self_share"]) for head in heads]
    assert f"| GPT-2 | {sum(shares) / len(shares):.3g} | {max(shares):.3g} | " in page
    random = reading["untrained"]["rates"]
    assert len(random) == len(reading["spectra"]["rates"])
    assert random[0]["noise_weight"] == reading["spectra"]["rates"][0]["noise_weight"]
    assert f"| ratio π, untrained | {random[0]['before']['difference']:.4g} |" in page
    assert "untrained" not in gpt2
    counted = reading["roles"]["roles"][0]
    assert f"| ratio π | subject | {counted['found']} | {counted['untrained']} |" in page
    for noted in (own["corpus"], reading["corpus"]):
        assert noted["fingerprint"] == Corpus.open(tiny_corpus).fingerprint
    described = json.loads((figures / "stories.json").read_text())
    assert sum(source["tokens"] for source in described["sources"]) == described["tokens"]
    assert f"fingerprint {described['fingerprint']}: {described['sources'][0]['source']} (" in page
    assert str(figures.parent) not in json.dumps([reading, gpt2])

    timing = json.loads((figures / "signal_noise_attention.json").read_text())
    found = timing["parts"]["attention"]["rows"][0]["ratios"]["combined / plain"]["elapsed"]
    assert f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})" in page
    held = [row for row in timing["parts"]["decode"]["rows"] if row["what"] == "heads"]
    assert [row["cache_ratios"]["one tensor"] for row in held] == [0.5, 0.5]

    assert run(render_signal_noise_attention, monkeypatch, "--results", figures, "--check") == 0
    # What is there is not measured again.
    capsys.readouterr()
    words = [tiny_corpus, "m", "--threads", 1, "--seeds", 0]
    words += ["--out", figures / "signal_noise_readings"]
    run(signal_noise_reading, monkeypatch, *words)
    assert capsys.readouterr().out.count("is there") == 2


def test_as_many_parameters_are_compared_with_gpt2():
    def trained(variant, seed, ce):
        settings = {"corpus": "c", "steps": 2, "batch_size": 1, "data": {"length": 4}}
        return {
            "variant": variant, "factor": 1.0, "seed": seed, "settings": settings, "ce": ce,
            "parameters": 100, "environment": {"date": "2026-01-01"},
        }  # fmt: skip

    rows = [trained("GPT-2", seed, 5 + seed / 10) for seed in range(3)]
    rows += [trained("R = 4", seed, 4.5 + seed / 10 + seed / 1000) for seed in range(3)]
    rows += [trained("R = 2, untied", seed, 5.1 - seed / 10) for seed in range(2)]
    page = render_signal_noise_attention.render(rows, [], {})
    line = "Lower loss with {} than with GPT-2 (100 parameters and 100): {} "
    assert line.format("R = 4", "**yes, in every seed**") in page
    assert line.format("R = 2, untied", "not shown") in page
