"""Heads trained by recipes, beside random states."""

from benchmarks.prototype_head import measure
from prismlm.files import read_json
from tests.benchmarks.scripts import run


def test_a_recipe_is_trained_once_beside_its_control(tiny_corpus, tmp_path, monkeypatch, capsys):
    words = [tiny_corpus, "methods", "--only", "detached", "--steps", 4, "--out", tmp_path, "--set"]
    words += ["model.preset=llama-tiny", "head.prototypes=64", "data.length=64", "batch_size=4"]
    run(measure, monkeypatch, *words, "device=cpu", "checkpoint.every=100")
    (file,) = tmp_path.iterdir()
    row = read_json(file)
    assert (file.name, row["kind"]) == ("method-detached-0.json", "method")
    assert row["quality"]["ce"] == row["control"]["ce"]
    assert row["quality"]["tokens"] == row["control"]["tokens"] > 0
    assert str(tiny_corpus) not in str(row["settings"])
    run(measure, monkeypatch, *words)
    assert "is there" in capsys.readouterr().out


def test_parts_vary_one_setting_at_a_time():
    methods = measure.recipes(measure.RECIPES, [])
    counts = {part: len(measure.chosen(part, methods)) for part in measure.PARTS}
    assert counts["methods"] == len(methods) - 1
    assert (counts["sampled"], counts["sweep"]) == (7, 6)
