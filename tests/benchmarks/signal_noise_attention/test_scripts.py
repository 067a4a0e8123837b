"""Signal/noise attention trained, read and timed by the scripts."""

import json
import math
import shutil

import pytest

from benchmarks.signal_noise_attention import measure, read, timing
from benchmarks.signal_noise_attention.measure import Variant
from prismlm.corpus import Corpus
from prismlm.files import read_json
from tests.benchmarks.scripts import run

SMALL = {"preset": "signal-noise-laptop", "hidden_size": 32, "head_size": 8, "num_hidden_layers": 1}
GPT2 = {"preset": "gpt2-laptop", "n_embd": 30, "n_layer": 1, "n_positions": 128}


@pytest.fixture(scope="module")
def figures(tiny_corpus, tmp_path_factory):
    """A folder of results: two models trained for a few steps and read, one under two seeds."""
    out = tmp_path_factory.mktemp("results")
    work, readings = out / "work", out / "signal_noise_readings"
    with pytest.MonkeyPatch.context() as patch:
        for module in (measure, read):
            two = {"ratio π": Variant(SMALL), "GPT-2": Variant(GPT2, None)}
            patch.setattr(module, "VARIANTS", two)
            patch.setattr(module, "LENGTH", 32)
        patch.setattr(read, "HEAD_TOKENS", 500)
        words = [tiny_corpus, "train", "--steps", 12, "--threads", 1, "--work", work]
        run(measure, patch, *words, "--out", out / "signal_noise_attention")
        run(measure, patch, tiny_corpus, "describe", "--out", out)
        shutil.copytree(work / "ratio-pi-0", work / "ratio-pi-1")
        for _ in range(2):
            words = [tiny_corpus, work, "--threads", 1, "--seeds", 0, 1, "--out", readings]
            run(read, patch, *words)
    return out


def test_models_are_trained_and_read(figures, tiny_corpus):
    own = read_json(figures / "signal_noise_attention" / "ratio-pi-0.json")
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    first, second, gpt2 = (
        read_json(figures / "signal_noise_readings" / f"{name}.json")
        for name in ("ratio-pi-0", "ratio-pi-1", "gpt-2-0")
    )
    assert "untrained" not in gpt2
    fingerprint = Corpus.open(tiny_corpus).fingerprint
    assert own["corpus"]["fingerprint"] == first["corpus"]["fingerprint"] == fingerprint
    assert read_json(figures / "stories.json")["fingerprint"] == fingerprint
    assert str(figures.parent) not in json.dumps([first, gpt2])
    # The same model twice, and two draws of random weights beside it.
    same, drawn = (
        [[layer["before"]["whole"] for layer in row[kind]["rates"]] for row in (first, second)]
        for kind in ("spectra", "untrained")
    )
    assert same[0] == same[1]
    assert drawn[0] != drawn[1]


def test_every_part_is_timed(tmp_path, monkeypatch):
    out = tmp_path / "timing.json"
    run(timing, monkeypatch, "--quick", "--rounds", 2, "--threads", 1, "--out", out)
    parts = read_json(out)["parts"]
    assert set(parts) == {"attention", "step", "decode"}
    assert [row["cache_ratios"]["gpt2-laptop"] for row in parts["decode"]["rows"]] == [1, 1]
    ratios = parts["step"]["rows"][0]["ratios"]["elapsed"]
    assert set(ratios) == set(timing.MODELS) - {"gpt2-laptop"}
