"""The long runs of ProtoT and LLaMA: the script."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.prototype_mixer import four_models, measure
from benchmarks.shared.options import RESULTS

RUNS = RESULTS / "prototype_mixer"


def test_what_was_measured_has_the_recipe_of_its_script():
    pairs = []
    for file in sorted(RUNS.glob("longer-*.json")):
        row = json.loads(file.read_text(encoding="utf-8"))
        recipe = measure.recipe_of(row["model"], Path("corpus-long"), row["seed"])
        pairs.append((row["settings"], recipe))
    for name in four_models.MODELS:
        row = json.loads((RUNS / "four_models" / f"{name}.json").read_text(encoding="utf-8"))
        lasting = (four_models.STEPS, four_models.WARMUP, Path("corpus-mixed"))
        rate = four_models.best_rate(RUNS / "four_models", name)
        pairs.append((row["settings"], four_models.recipe_of(name, rate, *lasting) | {"seed": 0}))
    assert len(pairs) == 8
    for settings, recipe in pairs:
        # Runs of before the setting spared nothing from weight decay.
        settings["optimizer"].setdefault("weight_decay_exempt", [])
        assert settings == recipe


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
