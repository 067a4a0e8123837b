import json
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prismlm.errors import InputError
from prismlm.models.sidecar import load_sidecar
from prismlm.training import TrainingInterrupted, build_recipe, estimate, train
from prismlm.training.checkpoints import latest_checkpoint, step_of
from tests.helpers import forked
from tests.helpers.runs import InterruptAfter, assert_same_run, curve, start


@pytest.mark.parametrize("stop_at", [3, 15])
def test_stopped_and_resumed_is_the_straight_run_bit_for_bit(settings, tmp_path, stop_at):
    straight = train(build_recipe(settings | {"out": str(tmp_path / "straight")}))
    recipe = build_recipe(settings)
    with pytest.raises(TrainingInterrupted, match="checkpoint") as stop:
        train(recipe, progress=InterruptAfter(stop_at))
    # The signal arrives while the step is being ended.
    assert step_of(stop.value.checkpoint) in (stop_at, stop_at + 1)
    resumed = train(recipe, resume=True)
    assert_same_run(recipe.out, straight.directory)
    assert curve(resumed.history) == curve(straight.history)
    assert resumed.quality == straight.quality
    assert resumed.tokens == straight.tokens


def test_the_result_is_a_model_directory_with_its_history(settings, tmp_path):
    recipe = build_recipe(settings)
    result = train(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe.out)
    provenance = load_sidecar(recipe.out, model).provenance
    assert provenance["recipe"] == recipe.to_dict()
    assert provenance["steps"] == 30
    assert provenance["quality"] == result.quality.to_dict()
    assert set(provenance["versions"]) >= {"prismlm", "torch", "transformers"}
    assert provenance["corpus"]["name"] == "sample"
    rows = [json.loads(line) for line in result.history_file.read_text().splitlines()]
    assert rows == result.history
    evaluations = {row["step"]: row for row in rows if "eval_ce" in row}
    assert set(evaluations) == {10, 20}
    assert {"eval_prototype_only_ce", "eval_fvu", "eval_in_use"} <= evaluations[20].keys()
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    # What safetensors would leave to the owner alone is as open as the rest.
    files = [path for path in recipe.out.iterdir() if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {
        stat.S_IMODE(result.history_file.stat().st_mode)
    }
    # Finished runs can be resumed too: nothing is left to do but the figures.
    again = train(recipe, resume=True)
    assert again.quality == result.quality


def test_a_plain_run_is_the_model_without_its_head(settings, tmp_path):
    settings["head"]["detach"] = True
    beside = train(build_recipe(settings))
    settings["head"]["enabled"] = False
    recipe = build_recipe(settings | {"out": str(tmp_path / "plain")})
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(12))
    plain = train(recipe, resume=True)
    assert plain.quality is None
    assert plain.ce == beside.quality.ce == beside.ce
    assert not {"prismlm.json", "prototype_head.safetensors"} & {
        p.name for p in recipe.out.iterdir()
    }
    with_head = load_file(beside.directory / "model.safetensors")
    for name, value in load_file(recipe.out / "model.safetensors").items():
        assert torch.equal(value, with_head[name]), name


def test_evaluations_before_the_placing_report_the_model_alone(settings):
    settings["head"]["initialise_at_step"] = 15
    rows = train(build_recipe(settings)).history
    first, second = (row for row in rows if "eval_ce" in row)
    assert set(first) == {"eval_ce", "eval_tokens", "epoch", "step"}
    assert "eval_prototype_only_ce" in second


def test_out_is_never_overwritten(settings, tmp_path):
    recipe = build_recipe(settings | {"steps": 6})
    recipe.out.mkdir()
    (recipe.out / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="not written by prismlm train"):
            train(recipe, resume=resume)
    (recipe.out / "thesis.tex").unlink()
    train(recipe)
    with pytest.raises(InputError, match="--resume"):
        train(recipe)


def test_another_recipe_is_not_resumed_and_the_difference_is_named(settings):
    settings["steps"] = 6
    train(build_recipe(settings))
    settings["head"]["prototypes"] = 64
    settings["optimizer"]["learning_rate"] = 0.5
    with pytest.raises(InputError) as error:
        train(build_recipe(settings), resume=True)
    assert "head.prototypes: 48 → 64" in str(error.value)
    assert "optimizer.learning_rate: 0.003 → 0.5" in str(error.value)


def test_too_little_text_says_what_to_lower(settings):
    with pytest.raises(InputError, match="lower batch_size"):
        train(build_recipe(settings | {"batch_size": 100_000}))
    settings["head"]["prototypes"] = 10_000_000
    with pytest.raises(InputError, match=r"lower head\.prototypes"):
        train(build_recipe(settings))


def test_a_missing_corpus_is_named(settings, tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        train(build_recipe(settings | {"corpus": str(tmp_path / "nowhere")}))
    assert not Path(settings["out"]).exists()


def test_the_estimate_measures_and_writes_nothing(settings):
    recipe = build_recipe(settings | {"steps": 1000})
    expected = estimate(recipe)
    assert expected.steps == 1000
    assert expected.tokens == 1000 * 4 * 32
    assert expected.head_parameters == 48 * 32 + 1
    assert 0 < expected.seconds_per_step < 5
    assert expected.seconds == pytest.approx(1000 * expected.seconds_per_step)
    assert expected.disk_bytes > 4 * expected.parameters
    assert not recipe.out.exists()


def test_ctrl_c_saves_says_how_to_go_on_and_exits_with_130(settings, tmp_path):
    settings["evaluation"]["every"] = 0
    process, path, checkpoints = start(settings, tmp_path, 60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert stdout == ""
    assert f"prismlm train {path} --resume" in stderr
    assert "Traceback" not in stderr
    assert 1 <= step_of(latest_checkpoint(checkpoints)) < 60
    done = forked.run("train", path, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 60
