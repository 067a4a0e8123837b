"""A run's directory: what it is compared by, its lock, and what is left behind."""

import json
import os

import pytest
import torch

from prismlm.errors import InputError
from prismlm.training import TrainingInterrupted, build_recipe, train
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import (
    FREE_TO_CHANGE,
    check_run_directory,
    exclusive,
)
from tests.helpers.runs import InterruptAfter


def other(key, value):
    """Return another valid value for a key of the tests' recipe."""
    chosen = {
        "head.initialise": "random",
        "head.initialise_at_step": 6,
        "head.anneal_from": 5,
        "head.prototypes_per_token": 5,
        "losses.residual_reduction": "sum",
        "optimizer.schedule": "linear",
        "optimizer.betas": [0.8, 0.9],
        "optimizer.weight_decay_exempt": [],
        "data.packing": "padded",
        "data.documents": 20,
        "optimizer.learning_rate_length": 8,
        "epochs": 3,
        "noise_weight": {"initial": 0.2},
        "uncertainty_feedback.rows": 9,
        "uncertainty_feedback.deviation": 0.5,
        "uncertainty_feedback.signal": "shuffled",
        "parallel": "fsdp2",
        "precision": "bf16",
        "device": "cuda",
        "model.model_type": "mistral",
        "model.hidden_size": 64,
        "model.num_key_value_heads": 1,
        "model.num_attention_heads": 4,
    }
    if key in chosen:
        return chosen[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 + 0.1 if isinstance(value, float) else value + "-other"


def flat(value, prefix=""):
    for key, item in value.items():
        if isinstance(item, dict):
            yield from flat(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def test_every_setting_that_changes_results_is_compared(settings):
    recipe = build_recipe(settings)
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(2))
    check_run_directory(recipe, resume=True)
    keys = dict(flat(recipe.to_dict()))
    # What is searched changes nothing of a run.
    sections = {name for name in Recipe.model_fields if name not in keys} - {"search"}
    check_run_directory(build_recipe(settings | {"search": {"trials": 3}}), resume=True)
    assert {key.split(".")[0] for key in keys if "." in key} == sections
    for key, value in keys.items():
        if key == "out":
            continue
        changed = recipe.to_dict()
        *path, name = key.split(".")
        here = changed
        for part in path:
            here = here[part]
        here[name] = other(key, value)
        if key == "epochs":
            # In place of steps.
            changed["steps"] = 0
        if key in FREE_TO_CHANGE:
            check_run_directory(build_recipe(changed), resume=True)
        else:
            with pytest.raises(InputError, match="another recipe") as error:
                check_run_directory(build_recipe(changed), resume=True)
            assert key in str(error.value)


def test_what_auto_came_to_is_noted_and_compared(settings):
    recipe = build_recipe(settings | {"device": "auto"})
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(2))
    run = recipe.out / "training.json"
    noted = json.loads(run.read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert noted["resolved"] == {"device": device, "precision": "float32"}
    # Naming what auto came to is no change; another machine's choice is.
    check_run_directory(build_recipe(settings | {"device": device}), resume=True)
    noted["resolved"]["device"] = "mps"
    run.write_text(json.dumps(noted))
    with pytest.raises(InputError, match=f"device: mps → {device}"):
        train(recipe, resume=True)


def test_two_processes_cannot_write_to_one_directory(settings):
    recipe = build_recipe(settings)
    refused = pytest.raises(InputError, match=f"another process, {os.getpid()}")
    with exclusive(recipe.out), refused:
        train(recipe)
    # What a killed process leaves is no lock.
    recipe.out.mkdir()
    (recipe.out / ".lock").write_text("1\n")
    with exclusive(recipe.out):
        pass
    assert list(recipe.out.iterdir()) == []


def test_a_directory_that_nothing_came_into_is_taken_away_again(tmp_path):
    out = tmp_path / "a" / "b"
    with exclusive(out):
        assert (out / ".lock").read_text() == f"{os.getpid()}\n"
    assert not out.exists()
    with exclusive(out):
        (out / "training.json").touch()
    assert [path.name for path in out.iterdir()] == ["training.json"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to"), exclusive(tmp_path / "file" / "out"):
        pass
