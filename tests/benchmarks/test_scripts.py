"""Scripts that train for hours, in small: runs, their settings, and where a cut run resumes."""

import json
import math
import shutil
from pathlib import Path

import pytest

from benchmarks.prototype_mixer import four_models, tables
from benchmarks.prototype_mixer import measure as mixers
from benchmarks.shared.options import RESULTS
from benchmarks.signal_noise_attention import measure as attention
from benchmarks.signal_noise_attention import read
from benchmarks.uncertainty_feedback import measure as feedback
from prismlm.files import read_json
from prismlm.training import build_recipe
from prismlm.training.setup import prepare
from tests.benchmarks.scripts import run


def results_of(folder):
    return {path.stem: read_json(path) for path in sorted(folder.iterdir())}


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


def test_a_run_goes_on_where_it_was_cut(tiny_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixers, "POSITIONS", 256)
    monkeypatch.setattr(mixers, "LENGTH", 32)
    words = [tiny_corpus, "longer", "--steps", 3, "--threads", 1, "--work", tmp_path / "work"]
    run(mixers, monkeypatch, *words, "--out", tmp_path / "out")
    llama, protot = sorted((tmp_path / "out").iterdir())
    row = read_json(protot)
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]))
    # Hardly trained, it is not far from guessing among 2,048 tokens.
    assert 200 < row["perplexity"] < 3000
    assert not row["resumed"]
    llama.unlink()
    (tmp_path / "work" / llama.stem).mkdir()
    run(mixers, monkeypatch, *words, "--out", tmp_path / "out")
    assert f"{protot.name} is there" in capsys.readouterr().out
    assert read_json(llama)["resumed"]


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


def test_signal_noise_attention_is_trained_and_read(tiny_corpus, tmp_path, monkeypatch):
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
    run(attention, monkeypatch, *words, "--out", out)
    own = read_json(out / "ratio-pi-0.json")
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    shutil.copytree(work / "ratio-pi-0", work / "ratio-pi-1")
    words = [tiny_corpus, work, "--threads", 1, "--seeds", 0, 1, "--out", tmp_path / "read"]
    run(read, monkeypatch, *words)
    found = results_of(tmp_path / "read")
    assert "untrained" not in found["gpt-2-0"]
    # The same model twice, and two draws of random weights beside it.
    pair = [found[f"ratio-pi-{seed}"] for seed in (0, 1)]
    assert pair[0]["spectra"]["rates"] == pair[1]["spectra"]["rates"]
    assert pair[0]["untrained"]["rates"] != pair[1]["untrained"]["rates"]


def test_every_run_of_feedback_is_a_recipe_and_another_one():
    arms = feedback.TRAIN | feedback.SWEEP | feedback.LITERAL
    assert len({feedback.slug(name) for name in arms}) == len(arms)
    recipes = [feedback.recipe_of(arm, "c", 0) for arm in arms.values()]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        built = build_recipe(recipe | {"out": "o"})
        assert built.uncertainty_feedback.enabled == ("uncertainty_feedback" in recipe)
