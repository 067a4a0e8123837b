"""Timings at tiny sizes on a CPU; above all those of a GPU, which one call has to get right."""

from pathlib import Path

from benchmarks import render
from benchmarks.gpu import timing
from benchmarks.pages.gpu import GOALS, MIXER
from benchmarks.prototype_head import gpu_curves
from prismlm.files import read_json, write_json
from prismlm.training import load_recipe, train
from tests.benchmarks.scripts import run

ROOT = Path(__file__).parents[2]
TINY = ["model.n_embd=32", "model.n_layer=1", "model.n_head=2", "data.length=32", "batch_size=4"]
TINY += ["steps=4", "precision=float32", "device=cpu", "compile=false", "evaluation.every=2"]
TINY += ["evaluation.tokens=200", "evaluation.final_tokens=200", "head.prototypes=64"]


def results_but(name, folder):
    """Link docs/results/ but for one file."""
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)


def test_every_part_of_a_gpu_is_timed_and_shown(tmp_path, monkeypatch):
    for part in timing.PARTS:
        run(timing, monkeypatch, tmp_path / "out", part, "--tiny")
    timed = read_json(tmp_path / "out" / "gpu.json")["parts"]
    figures = {name: part["figures"] for name, part in timed.items()}
    for name in ("head, gpt2-small", "head, gpt2-xl"):
        assert figures[name]["ratio"]["ratio"] > 0
        # The optimizer of a CPU looks at the steps of two more parameters; the head at nothing.
        assert figures[name]["waits"]["with"] - figures[name]["waits"]["without"] == 2
    assert set(figures["feedback"]["timed"]) == {"decode", "prefill", "step"}
    assert set(figures["mixer"]["parts"]) == {"mixer", "step"}
    assert figures["training"]["waits_of_a_step"] >= 0
    assert figures["index"]["states"]["train"] > figures["index"]["states"]["heldout"] > 0
    results_but("gpu.json", tmp_path)
    assert render.page("gpu", tmp_path).count("| not timed |") == len(GOALS)
    write_json(tmp_path / "gpu.json", {"parts": timed})
    page = render.page("gpu", tmp_path)
    # The mixer at tiny sizes has other lengths and precision.
    assert page.count("| not timed |") == len(MIXER)
    assert "Failed" not in page
    run(timing, monkeypatch, tmp_path / "out", "mixer", "--failed", "no GPU")
    assert read_json(tmp_path / "out" / "gpu.json")["parts"]["mixer"]["failed"] == "no GPU"


def test_curves_of_a_gpu_are_gathered_from_several_calls(tiny_corpus, tmp_path, monkeypatch):
    results_but("prism_gpu.json", tmp_path)
    for name in ("default", "source", "plain"):
        assert "GPT-2 small on a GPU" not in render.page("prototype_head", tmp_path)
        model = tmp_path / "work" / name
        changes = [*TINY, f"corpus={tiny_corpus}", f"out={model}"]
        train(load_recipe(ROOT / f"recipes/gpt2-small-gpu/100m-{name}.yaml", changes))
        run(gpu_curves, monkeypatch, tmp_path, name, model, 3)
    models = read_json(tmp_path / "prism_gpu.json")["models"]
    for row in models.values():
        assert [point["tokens"] for point in row["curve"]] == [256, 512]
        assert row["calls"] == [{"seconds": 3, "to_step": 4}]
    # No gradient of the default head reaches the model.
    default, source, plain = ([p["ce"] for p in row["curve"]] for row in models.values())
    assert default == plain != source
    page = render.page("prototype_head", tmp_path)
    assert "## GPT-2 small on a GPU" in page
    assert "Not trained to the end yet" not in page
    # A run that was cut.
    history = model / "training.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:-1]))
    run(gpu_curves, monkeypatch, tmp_path, "plain", model, 2)
    cut = read_json(tmp_path / "prism_gpu.json")["models"]["plain"]
    assert [call["seconds"] for call in cut["calls"]] == [3, 2]
    assert "Not trained to the end yet: plain." in render.page("prototype_head", tmp_path)
