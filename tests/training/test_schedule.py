"""What the learning rates are at each step."""

import pytest

from prismlm.training import build_recipe
from prismlm.training.device import resolved
from prismlm.training.run_directory import differences
from prismlm.training.setup import build_trainer, prepare


def rates(settings, tmp_path, **optimizer):
    """Return every group's share of its own peak before each of ten steps, and after them."""
    changes = {"learning_rate": 1e-2, "head_learning_rate": 3e-2, "warmup": 0.2}
    settings |= {"steps": 10, "optimizer": changes | optimizer}
    trainer = build_trainer(prepare(build_recipe(settings)), tmp_path, [])
    trainer.create_optimizer_and_scheduler(10)
    peaks = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    assert set(peaks) == {1e-2, 3e-2}
    found = []
    for _ in range(11):
        groups = trainer.optimizer.param_groups
        shares = {round(group["lr"] / peak, 9) for group, peak in zip(groups, peaks, strict=True)}
        assert len(shares) == 1
        found += shares
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return found


def test_a_cosine_ends_at_its_floor(settings, tmp_path):
    # Two steps up; then 0.1 + 0.9 (1 + cos(π n / 8)) / 2: cos(π/4) = 0.70710678 at n = 2.
    found = rates(settings, tmp_path, final_learning_rate_share=0.1)
    assert found[:3] == [0, 0.5, 1]
    assert found[4] == pytest.approx(0.1 + 0.45 * 1.70710678)
    assert found[6] == pytest.approx(0.55)
    assert found[8] == pytest.approx(0.1 + 0.45 * 0.29289322)
    assert found[10] == pytest.approx(0.1)


def test_without_a_floor_it_ends_at_nothing(settings, tmp_path):
    found = rates(settings, tmp_path)
    assert found[:3] == [0, 0.5, 1]
    assert found[6] == pytest.approx(0.5)
    assert found[10] == 0


def test_a_run_begun_before_the_setting_was_there_can_be_resumed(settings):
    recipe = build_recipe(settings)
    before = recipe.to_dict()
    del before["optimizer"]["final_learning_rate_share"]
    run = {"recipe": before, "resolved": resolved(recipe)}
    assert differences(run, recipe) == []
    settings["optimizer"]["final_learning_rate_share"] = 0.1
    changed = "optimizer.final_learning_rate_share: 0.0 → 0.1"
    assert differences(run, build_recipe(settings)) == [changed]
    settings["optimizer"]["final_learning_rate_share"] = 0.0
    settings["model"] |= {"attention_dropout": 0.2, "rms_norm_eps": 1e-5}
    found = differences(run, build_recipe(settings))
    assert found == [
        "model.attention_dropout: 0.1 → 0.2",
        "model.rms_norm_eps: not set → 1e-05",
    ]
