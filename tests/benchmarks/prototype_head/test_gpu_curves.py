"""What a GPU gives in several calls, at tiny sizes on a CPU, and the page's section of it."""

from pathlib import Path

from benchmarks import render
from benchmarks.prototype_head import gpu_curves
from prismlm.files import read_json, write_json
from prismlm.training import load_recipe, train
from tests.benchmarks.scripts import run

ROOT = Path(__file__).parents[3]
TINY = ["model.n_embd=32", "model.n_layer=1", "model.n_head=2", "data.length=32", "batch_size=4"]
TINY += ["steps=4", "precision=float32", "device=cpu", "compile=false", "evaluation.every=2"]
TINY += ["evaluation.tokens=200", "evaluation.final_tokens=200", "head.prototypes=64"]
NAMES = ("default", "source", "plain")


def test_curves_are_gathered_and_shown_once_all_three_are_there(tiny_corpus, tmp_path, monkeypatch):
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name != "prism_gpu.json":
            (tmp_path / path.name).symlink_to(path)
    for name in NAMES:
        assert "GPT-2 small on a GPU" not in render.page("prototype_head", tmp_path)
        model = tmp_path / "work" / name
        changes = [*TINY, f"corpus={tiny_corpus}", f"out={model}"]
        recipe = load_recipe(ROOT / f"recipes/gpt2-small-gpu/100m-{name}.yaml", changes)
        train(recipe)
        run(gpu_curves, monkeypatch, tmp_path, name, model, 3)
    models = read_json(tmp_path / "prism_gpu.json")["models"]
    assert set(models) == set(NAMES)
    for row in models.values():
        assert [point["tokens"] for point in row["curve"]] == [256, 512]
        assert row["calls"] == [{"seconds": 3, "to_step": 4}]
    # No gradient of the default head reaches the model.
    assert [p["ce"] for p in models["default"]["curve"]] == [
        p["ce"] for p in models["plain"]["curve"]
    ]
    assert models["source"]["quality"]["ce"] != models["plain"]["quality"]["ce"]
    page = render.page("prototype_head", tmp_path)
    assert "## GPT-2 small on a GPU" in page
    assert "Not trained to the end yet" not in page
    assert str(tmp_path) not in str(models)

    # A run that was cut, then one of another length.
    history = model / "training.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:-1]))
    run(gpu_curves, monkeypatch, tmp_path, "plain", model, 2)
    cut = read_json(tmp_path / "prism_gpu.json")["models"]["plain"]
    assert [call["seconds"] for call in cut["calls"]] == [3, 2]
    assert "Not trained to the end yet: plain." in render.page("prototype_head", tmp_path)
    settings = read_json(model / "training.json")
    settings["recipe"]["steps"] = 8
    write_json(model / "training.json", settings)
    run(gpu_curves, monkeypatch, tmp_path, "plain", model, 2)
    assert set(read_json(tmp_path / "prism_gpu.json")["models"]) == {"plain"}
