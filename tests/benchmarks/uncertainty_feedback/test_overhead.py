"""What uncertainty feedback costs: timed and counted."""

import json

import pytest

from benchmarks.uncertainty_feedback import overhead as uncertainty_overhead
from tests.benchmarks.scripts import run


@pytest.fixture
def overhead(tmp_path, monkeypatch):
    out = tmp_path / "results" / "uncertainty_overhead.json"
    words = ["--width", 32, "--layers", 2, "--vocabulary", 300, "--levels", 128, "--rounds", 3]
    words += ["--large-batch", 2]
    words += ["--length", 24, "--prompt", 8, "--tokens", 8, "--threads", 1, "--out", out]
    run(uncertainty_overhead, monkeypatch, *words)
    return out


def test_the_overhead_is_timed_and_counted(overhead):
    result = json.loads(overhead.read_text(encoding="utf-8"))
    alone = "what one pass adds, alone"
    assert {part: set(forms) for part, forms in result["timed"].items()} == {
        "decode": {"no feedback, again", "one pass"},
        "prefill": {"one pass", "two passes"},
        "step": {"one pass", "two passes", alone},
        "large step": {"one pass", alone},
    }
    assert result["memory"]["table"] == {
        "weights": 4 * 128 * 32, "gradients": 4 * 128 * 32, "optimizer": 8 * 128 * 32
    }  # fmt: skip
    parameters = result["model"]["parameters"]
    assert parameters == 300 * 32 + 1024 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert result["memory"]["model"]["weights"] == 4 * parameters
    found = result["timed"]["step"]["two passes"]["elapsed"]
    assert found["low"] <= found["ratio"] <= found["high"]
    # 12 positions are seen, 2 layers of width 32.
    forward = 2 * (parameters - 1024 * 32) + 4 * 12 * 64
    assert result["counted"]["decode"] == pytest.approx((7 * 300 + 32) / forward)


def ratio(value, low, high):
    return {"processor": {"ratio": value, "low": low, "high": high}}
