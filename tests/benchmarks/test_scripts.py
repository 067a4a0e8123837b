"""Scripts that train or time for hours, in small: runs, their settings, where a cut run resumes."""

import json
import math
import shutil
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.gpu import timing
from benchmarks.pages.gpu import GOALS, MIXER
from benchmarks.prototype_head import gpu_curves
from benchmarks.prototype_mixer import four_models, tables
from benchmarks.prototype_mixer import measure as mixers
from benchmarks.robustness import still_true
from benchmarks.shared.options import RESULTS
from benchmarks.signal_noise_attention import longer, read
from benchmarks.signal_noise_attention import measure as attention
from benchmarks.uncertainty_feedback import measure as feedback
from prismlm.files import read_json, write_json
from prismlm.training import build_recipe, load_recipe, train
from prismlm.training.setup import prepare
from tests.conftest import made_once


def test_what_was_measured_has_the_recipe_of_its_script():
    folder, pairs = RESULTS / "prototype_mixer", []
    for file in folder.glob("longer-*.json"):
        row = read_json(file)
        pairs.append((row, mixers.recipe_of(row["model"], Path("corpus-long"), row["seed"])))
    folder /= "four_models"
    for name in four_models.MODELS:
        lasting = (four_models.STEPS, four_models.WARMUP, Path("corpus-mixed"))
        rate = four_models.best_rate(folder, name)
        recipe = four_models.recipe_of(name, rate, *lasting) | {"seed": 0}
        pairs.append((read_json(folder / f"{name}.json"), recipe))
    assert len(pairs) == 8
    for row, recipe in pairs:
        # Runs of before the setting spared nothing from weight decay.
        row["settings"]["optimizer"].setdefault("weight_decay_exempt", [])
        assert row["settings"] == recipe


def test_a_run_goes_on_where_it_was_cut(tiny_corpus, tmp_path, monkeypatch, capsys, run):
    monkeypatch.setattr(mixers, "POSITIONS", 256)
    monkeypatch.setattr(mixers, "LENGTH", 32)
    words = [tiny_corpus, "longer", "--steps", 3, "--threads", 1, "--work", tmp_path / "work"]
    run(mixers, *words, "--out", tmp_path / "out")
    llama, protot = sorted((tmp_path / "out").iterdir())
    row = read_json(protot)
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]))
    # Hardly trained, it is not far from guessing among 2,048 tokens.
    assert 200 < row["perplexity"] < 3000
    assert not row["resumed"]
    llama.unlink()
    (tmp_path / "work" / llama.stem).mkdir()
    run(mixers, *words, "--out", tmp_path / "out")
    assert f"{protot.name} is there" in capsys.readouterr().out
    assert read_json(llama)["resumed"]


def test_a_rate_is_chosen_and_reported_on_other_documents(tiny_corpus, tmp_path, monkeypatch, run):
    monkeypatch.setitem(four_models.MODELS, "llama", {"preset": "llama-tiny"})
    monkeypatch.setattr(mixers, "POSITIONS", 1024)
    words = [tiny_corpus, "long", "--only", "llama", "--steps", 6, "--rate", 1e-3]
    run(four_models, *words, "--work", tmp_path / "work", "--out", tmp_path)
    row = read_json(tmp_path / "long" / "llama-0.001.json")
    # Weight decay spares embeddings, unless a recipe says otherwise.
    assert "weight_decay_exempt" not in row["settings"]["optimizer"]
    # All held-out text is in one half or the other.
    assert min(row["halves"].values()) < row["ce"] < max(row["halves"].values())


def test_every_row_of_the_source_is_another_model_at_several_rates(tiny_corpus, tmp_path):
    rows = tables.ablations(tiny_corpus)
    named = {name for entries in tables.SOURCE["ablations"].values() for name, _, _ in entries}
    assert {case.name for case in rows} == named
    assert len({json.dumps([case.settings]) for case in rows}) == len(rows) == 25
    for case in [*rows, *tables.contexts(tiny_corpus, [256, 2048])]:
        assert len(set(case.rates)) == len(case.rates) >= 3
        recipe = build_recipe(case.settings | {"seed": 0, "out": str(tmp_path / "out")})
        assert recipe.batch_size * recipe.data.length == tables.POSITIONS
        config = prepare(recipe).model.model.config
        # Of a laptop's size, whatever the recipe says of the source's.
        assert config.hidden_size == (320 if case.name.startswith("protot-wide") else 160)


def test_signal_noise_attention_is_trained_and_read(tiny_corpus, tmp_path, monkeypatch, run):
    small = {"hidden_size": 32, "head_size": 8, "num_hidden_layers": 1}
    gpt2 = {"preset": "gpt2-laptop", "n_embd": 30, "n_layer": 1, "n_positions": 128}
    variants = {
        "ratio π": attention.Variant({"preset": "signal-noise-laptop"} | small),
        "GPT-2": attention.Variant(gpt2, None),
    }
    for module in (attention, read):
        monkeypatch.setattr(module, "VARIANTS", variants)
        monkeypatch.setattr(module, "LENGTH", 32)
    monkeypatch.setattr(read, "HEAD_TOKENS", 500)
    out, work = tmp_path / "out", tmp_path / "work"
    words = [tiny_corpus, "train", "--steps", 12, "--threads", 1, "--work", work]
    run(attention, *words, "--out", out)
    own = read_json(out / "ratio-pi-0.json")
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    shutil.copytree(work / "ratio-pi-0", work / "ratio-pi-1")
    words = [tiny_corpus, work, "--threads", 1, "--seeds", 0, 1, "--out", tmp_path / "read"]
    run(read, *words)
    found = {path.stem: read_json(path) for path in (tmp_path / "read").iterdir()}
    assert "untrained" not in found["gpt-2-0"]
    # The same model twice, and two draws of random weights beside it.
    pair = [found[f"ratio-pi-{seed}"] for seed in (0, 1)]
    assert pair[0]["spectra"]["rates"] == pair[1]["spectra"]["rates"]
    assert pair[0]["untrained"]["rates"] != pair[1]["untrained"]["rates"]
    # The longer runs are read the same way, and drawn.
    monkeypatch.setattr(longer, "LAYER", 0)
    models = [work / name for name in ("ratio-pi-0", "gpt-2-0", "ratio-pi-1")]
    run(longer, tiny_corpus, *models, "--images", tmp_path, "--out", tmp_path / "longer")
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == [f"prism-{name}.png" for name in ("maps", "roles", "training")]
    again = read_json(tmp_path / "longer" / "prism.json")
    assert (again["ce"], again["spectra"]["rates"]) == (own["ce"], pair[0]["spectra"]["rates"])
    assert read_json(tmp_path / "longer" / "rates.json")["ratio-pi-1"]["ce"] == own["ce"]


def test_every_run_of_feedback_is_a_recipe_and_another_one():
    arms = feedback.TRAIN | feedback.SWEEP | feedback.LITERAL
    assert len({feedback.slug(name) for name in arms}) == len(arms)
    recipes = [feedback.recipe_of(arm, "c", 0) for arm in arms.values()]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        built = build_recipe(recipe | {"out": "o"})
        assert built.uncertainty_feedback.enabled == ("uncertainty_feedback" in recipe)


ROOT = Path(__file__).parents[2]
TINY = ["model.n_embd=32", "model.n_layer=1", "model.n_head=2", "data.length=32", "batch_size=4"]
TINY += ["steps=4", "precision=float32", "device=cpu", "compile=false", "evaluation.every=2"]
TINY += ["evaluation.tokens=200", "evaluation.final_tokens=200", "head.prototypes=64"]


def results_but(name, folder):
    """Link docs/results/ but for one file."""
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)


def test_every_part_of_a_gpu_is_timed_and_shown(tmp_path, run):
    for part in timing.PARTS:
        run(timing, tmp_path / "out", part, "--tiny")
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
    run(timing, tmp_path / "out", "mixer", "--failed", "no GPU")
    assert read_json(tmp_path / "out" / "gpu.json")["parts"]["mixer"]["failed"] == "no GPU"


def test_curves_of_a_gpu_are_gathered_from_several_calls(tiny_corpus, tmp_path, run):
    results_but("prism_gpu.json", tmp_path)
    for name in ("default", "source", "plain"):
        assert "GPT-2 small on a GPU" not in render.page("prototype_head", tmp_path)
        model = tmp_path / "work" / name
        changes = [*TINY, f"corpus={tiny_corpus}", f"out={model}"]
        train(load_recipe(ROOT / f"recipes/gpt2-small-gpu/100m-{name}.yaml", changes))
        run(gpu_curves, tmp_path / "prism_gpu.json", name, model, 3)
    models = read_json(tmp_path / "prism_gpu.json")["models"]
    for row in models.values():
        assert [point["tokens"] for point in row["curve"]] == [256, 512]
        assert row["calls"] == [{"seconds": 3, "to_step": 4}]
    # No gradient of the default head reaches the model.
    default, source, plain = ([p["ce"] for p in row["curve"]] for row in models.values())
    assert default == plain != source
    for name in ("default", "source"):
        changes = [*TINY, f"corpus={tiny_corpus}", f"out={tmp_path / 'work' / f'10m-{name}'}"]
        trained = train(load_recipe(ROOT / f"recipes/gpt2-10m/50m-{name}.yaml", changes))
        run(gpu_curves, tmp_path / "prism_10m.json", name, trained.directory, 3)
    page = render.page("prototype_head", tmp_path)
    assert "## GPT-2 small on a GPU" in page
    assert "## GPT-2 of 10 M parameters" in page
    assert "Not trained to the end yet" not in page
    # A run that was cut.
    history = model / "training.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:-1]))
    run(gpu_curves, tmp_path / "prism_gpu.json", "plain", model, 2)
    cut = read_json(tmp_path / "prism_gpu.json")["models"]["plain"]
    assert [call["seconds"] for call in cut["calls"]] == [3, 2]
    assert "Not trained to the end yet: plain." in render.page("prototype_head", tmp_path)


@pytest.mark.parametrize("variant", still_true.VARIANTS, ids=lambda one: f"{one.group}: {one.name}")
def test_what_has_changed_since(tmp_path_factory, tmp_path, variant):
    trees = made_once(tmp_path_factory, "still-true", still_true.make)
    found = still_true.outcome(variant, trees, tmp_path / "changed")
    assert found["outcome"] == found["wanted"], found["says"]
    if found["outcome"] == "refused":
        assert len(found["says"]) > 40
