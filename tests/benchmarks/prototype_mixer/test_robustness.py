"""The study of robustness on tiny models."""

import json

import pytest

from benchmarks.prototype_mixer import render_robustness, robustness
from tests.benchmarks.scripts import run
from tests.helpers.studied import pair_rows, write_pairs


@pytest.fixture(scope="module")
def written(studied, tmp_path_factory):
    """What the script writes for three tiny models."""
    directory = tmp_path_factory.mktemp("robustness")
    flips = [row for row in pair_rows() if row[0] == "negation"]
    write_pairs(directory / "interventions.parquet", flips)
    noise = [row for row in pair_rows() if row[0] != "negation"]
    write_pairs(directory / "perturbations.parquet", noise)
    names = {"protot": "protot", "llama": "llama", "mamba2": "mamba"}
    models = [
        word for name, kind in names.items() for word in ("--model", f"{name}={studied / kind}")
    ]
    out = directory / "results" / render_robustness.FOLDER
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prismlm.statistics.RESAMPLES", 100)
        for part in ("compare", "clamp"):
            run(robustness, patch, part, "--pairs", directory, "--out", out, *models)
    return directory / "results"


def test_what_is_there_is_passed_over(studied, written, monkeypatch, capsys):
    folder = written / render_robustness.FOLDER
    before = (folder / "clamping-llama.json").read_text()
    model = f"llama={studied / 'gpt2'}"
    arguments = ("clamp", "--pairs", written.parent, "--out", folder, "--model", model)
    run(robustness, monkeypatch, *arguments)
    assert "clamping-llama.json is there" in capsys.readouterr().out
    assert (folder / "clamping-llama.json").read_text() == before
    assert json.loads(before)["routing"] == "attention"
