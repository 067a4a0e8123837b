"""The long runs of ProtoT and LLaMA: the script."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.prototype_mixer import measure
from prismlm.training import build_recipe
from prismlm.training.setup import prepare

RESULTS = Path(__file__).parents[3] / "docs/results/prototype_mixer"


def test_what_was_measured_has_the_recipe_of_the_script():
    files = sorted(RESULTS.glob("longer-*.json"))
    assert len(files) == 4
    for file in files:
        row = json.loads(file.read_text(encoding="utf-8"))
        # Runs of before the setting spared nothing from weight decay.
        row["settings"]["optimizer"].setdefault("weight_decay_exempt", [])
        assert row["settings"] == measure.recipe_of(row["model"], Path("corpus-long"), row["seed"])


def test_all_models_see_the_same_rows(tiny_corpus, tmp_path):
    seen = []
    for model in measure.MODELS:
        settings = measure.recipe_of(model, tiny_corpus, 0, 3)
        settings["data"]["length"] = 64
        rows = prepare(build_recipe(settings | {"out": str(tmp_path)})).rows
        assert not rows.shared_rows
        seen.append(torch.stack([rows[i]["input_ids"] for i in range(0, len(rows), 7)]))
    for rows in seen[1:]:
        assert torch.equal(rows, seen[0])


def test_a_run_is_measured_once_and_goes_on_where_it_was_cut(
    tiny_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measure, "POSITIONS", 256)
    monkeypatch.setattr(measure, "LENGTH", 32)
    command = ["measure.py", str(tiny_corpus), "longer", "--steps", "3", "--threads", "1"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "prototype_mixer")]
    monkeypatch.setattr("sys.argv", command)
    measure.main()
    files = sorted((tmp_path / "prototype_mixer").iterdir())
    assert [path.name for path in files] == ["longer-llama-32-0.json", "longer-protot-32-0.json"]
    row = json.loads(files[1].read_text(encoding="utf-8"))
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]))
    # Hardly trained, it is not far from guessing among 2,048 tokens.
    assert 200 < row["perplexity"] < 3000
    assert 0 < row["tokens"] <= 3 * 256
    assert not row["resumed"]
    assert not any((tmp_path / "work").iterdir())

    before = files[1].stat().st_mtime_ns
    files[0].unlink()
    (tmp_path / "work" / "longer-llama-32-0").mkdir()
    capsys.readouterr()
    measure.main()
    assert files[1].stat().st_mtime_ns == before
    assert "longer-protot-32-0.json is there" in capsys.readouterr().out
    assert json.loads(files[0].read_text(encoding="utf-8"))["resumed"]
