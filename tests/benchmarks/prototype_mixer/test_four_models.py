"""The four models that are trained for longer: their recipes and sizes."""

from pathlib import Path

from benchmarks.prototype_mixer.four_models import MODELS, STEPS, WARMUP, best_rate, recipe_of
from benchmarks.shared.options import RESULTS
from prismlm.files import read_json

FOLDER = RESULTS / "prototype_mixer" / "four_models"


def test_what_was_measured_has_the_recipe_of_the_script_at_the_best_rate():
    for name in MODELS:
        row = read_json(FOLDER / f"{name}.json")
        # Runs of before the setting spared nothing from weight decay.
        row["settings"]["optimizer"].setdefault("weight_decay_exempt", [])
        expected = recipe_of(name, best_rate(FOLDER, name), STEPS, WARMUP, Path("corpus-mixed"))
        assert row["settings"] == expected | {"seed": 0}


def test_models_are_of_one_size():
    sizes = [read_json(FOLDER / f"{name}.json")["parameters"] for name in MODELS]
    assert max(sizes) / min(sizes) < 1.02
