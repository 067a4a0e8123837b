"""The prototype mixer's benchmark: what it compares is the same thing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pages.mixer import MODELS
from benchmarks.shared import turns

ROOT = Path(__file__).parents[3]


def test_ratios_by_hand():
    assert turns.ratios([2, 6, 4], [1, 2, 2]) == {"ratio": 2, "low": 2, "high": 3}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the script writes at its smallest."""
    out = tmp_path_factory.mktemp("results") / "mixer.json"
    command = [sys.executable, "-m", "benchmarks.prototype_mixer.timing", "--quick"]
    command += ["--rounds", "2"]
    command += ["--threads", "1", "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_part_is_timed(measured):
    result = json.loads(measured.read_text(encoding="utf-8"))
    parts = {name: part["rows"] for name, part in result["parts"].items()}
    assert set(parts) == {"mixer", "step", "throughput", "decode"}
    for row in parts["mixer"]:
        assert set(row["ratios"]["elapsed"]) == {"attention"}
        assert row["ratios"]["elapsed"]["attention"]["low"] > 0
    assert [row["length"] for row in parts["step"]] == [32, 64]
    assert set(parts["throughput"][-1]["milliseconds"]) == set(MODELS)
    kept = {(row["model"], row["position"]): row["cache_mib"] for row in parts["decode"]}
    assert kept["protot", 20] == kept["protot", 40]
    # Keys and values of 20 positions, 2 layers, width 32, float32.
    assert kept["llama", 20] == pytest.approx(2 * 2 * 20 * 32 * 4 / 2**20, abs=1e-3)
