"""Checkpoints that a run cannot be resumed from."""

import shutil

import pytest

from prismlm.errors import FormatError, InputError
from prismlm.training import TrainingInterrupted, build_recipe, train
from prismlm.training.checkpoints import latest_checkpoint, step_of
from tests.helpers.runs import InterruptAfter


def test_a_checkpoint_of_another_run_is_refused_and_the_difference_named(settings, tmp_path):
    recipe = build_recipe(settings | {"steps": 8})
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(3))
    own = latest_checkpoint(recipe.out / "checkpoints")
    optimizer = {"learning_rate": 0.5}
    foreign = {"steps": 8, "optimizer": optimizer, "out": str(tmp_path / "foreign")}
    train(build_recipe(settings | foreign))
    copied = own.with_name("checkpoint-8")
    shutil.copytree(tmp_path / "foreign/checkpoints/checkpoint-8", copied)
    with pytest.raises(InputError) as error:
        train(recipe, resume=True)
    assert str(copied) in str(error.value)
    assert "optimizer.learning_rate: 0.5 → 0.003" in str(error.value)
    shutil.rmtree(copied)
    shutil.copytree(own, own.with_name("checkpoint-7"))
    with pytest.raises(InputError, match=f"steps done: {step_of(own)} → 7"):
        train(recipe, resume=True)
    (own.with_name("checkpoint-7") / "prismlm.json").unlink()
    with pytest.raises(FormatError, match=r"checkpoint-7 cannot be resumed from.*prismlm\.json"):
        train(recipe, resume=True)
    shutil.rmtree(own.with_name("checkpoint-7"))
    assert train(recipe, resume=True).steps == 8


def test_a_damaged_checkpoint_is_named_with_what_to_do(settings):
    recipe = build_recipe(settings | {"steps": 8})
    with pytest.raises(TrainingInterrupted) as stop:
        train(recipe, progress=InterruptAfter(3))
    checkpoint = stop.value.checkpoint
    for name, damage in (
        ("model.safetensors", lambda whole: whole[: len(whole) // 2]),
        ("prismlm_training_state.pt", lambda whole: b""),
        ("prismlm_training_state.pt", lambda whole: b"what is no state of anything"),
        ("prismlm_training_state.pt", lambda whole: whole[: len(whole) // 2]),
        ("trainer_state.json", lambda whole: whole[: len(whole) // 2]),
        ("trainer_state.json", lambda whole: b"[]"),
        ("optimizer.pt", lambda whole: whole[: len(whole) // 2]),
        ("optimizer.pt", lambda whole: b"what is no state of anything"),
        ("scheduler.pt", lambda whole: b""),
        ("rng_state.pth", lambda whole: whole[: len(whole) // 2]),
    ):
        file = checkpoint / name
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        with pytest.raises(FormatError) as error:
            train(recipe, resume=True)
        assert f"{checkpoint} cannot be resumed from (" in str(error.value), name
        assert "(). Delete it" not in str(error.value)
        assert "Delete it, and training resumes from the one before." in str(error.value)
        file.write_bytes(whole)
    assert train(recipe, resume=True).steps == 8
