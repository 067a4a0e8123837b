"""The study of robustness on tiny models."""

import json

from benchmarks.prototype_mixer import robustness
from tests.benchmarks.scripts import run
from tests.helpers.studied import pair_rows, write_pairs


def test_models_are_compared_and_clamped_once(studied, tmp_path, monkeypatch, capsys):
    flips = [row for row in pair_rows() if row[0] == "negation"]
    write_pairs(tmp_path / "interventions.parquet", flips)
    noise = [row for row in pair_rows() if row[0] != "negation"]
    write_pairs(tmp_path / "perturbations.parquet", noise)
    monkeypatch.setattr("prismlm.statistics.RESAMPLES", 20)
    words = ["--pairs", tmp_path, "--out", tmp_path / "out", "--limit", 1]
    words += ["--model", f"llama={studied / 'llama'}", "--model", f"mamba2={studied / 'mamba'}"]
    for part in ("compare", "clamp"):
        run(robustness, monkeypatch, part, *words)
    found = {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == [
        "clamping-llama", "clamping-mamba2", "interventions", "perturbations"
    ]  # fmt: skip
    assert json.loads(found["clamping-llama"])["routing"] == "attention"
    assert "has no routing" in json.loads(found["clamping-mamba2"])["said"]
    compared = json.loads(found["perturbations"])
    assert [one["name"] for one in compared["models"]] == ["llama", "mamba2"]
    run(robustness, monkeypatch, "clamp", *words)
    assert "clamping-llama.json is there" in capsys.readouterr().out
    assert {path.stem: path.read_text() for path in (tmp_path / "out").iterdir()} == found
