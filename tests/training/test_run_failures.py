"""What goes wrong in a run: it says what, leaves what can be gone on from, and goes on from it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.errors import FormatError, InputError, PrismError
from prismlm.training import PrismForCausalLM, TrainingInterrupted, build_recipe, train
from prismlm.training.checkpoints import latest_checkpoint, list_checkpoints, step_of
from prismlm.training.recipe import Recipe
from prismlm.training.run_directory import FREE_TO_CHANGE, check_run_directory, exclusive
from tests.helpers import forked
from tests.helpers.runs import InterruptAfter, assert_same_run, curve, start


@contextmanager
def poisoned(parameter, step, value, *, after_update=False):
    """Put a value into a weight before the forward pass of a step, or after its update."""
    seen = {"steps": 0}

    def poison():
        with torch.no_grad():
            seen["model"].get_parameter(parameter).view(-1)[0] = value

    def before(module, args):
        if isinstance(module, PrismForCausalLM) and module.training:
            seen["model"] = module
            seen["steps"] += 1
            if seen["steps"] == step and not after_update:
                poison()

    def after(optimizer, args, kwargs):
        if seen["steps"] == step and after_update:
            poison()

    handles = [register_module_forward_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """A run that nothing happens to."""
    out = tmp_path_factory.mktemp("straight") / "model"
    return train(build_recipe(same_settings | {"out": str(out)}))


def assert_recovers(settings, straight):
    """Go on with a broken run and compare it with one that nothing happened to."""
    recipe = build_recipe(settings)
    resumed = train(recipe, resume=True)
    assert_same_run(recipe.out, straight.directory)
    assert curve(resumed.history) == curve(straight.history)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_names_step_weight_and_checkpoint(settings, straight, value):
    recipe = build_recipe(settings)
    checkpoint = recipe.out / "checkpoints" / "checkpoint-10"
    weight = "model.model.norm.weight"
    with poisoned(weight, 15, value), pytest.raises(PrismError) as error:
        train(recipe)
    message = str(error.value)
    assert "the loss is nan at step 15 (ce nan" in message
    assert f"The weight {weight} is not finite" in message
    assert f"The last good checkpoint is {checkpoint} (step 10)" in message
    assert list_checkpoints(checkpoint.parent) == [checkpoint]
    assert not (recipe.out / "prismlm.json").exists()
    assert_recovers(settings, straight)


def test_an_update_that_breaks_a_weight_is_not_saved(settings, straight):
    recipe = build_recipe(settings)
    checkpoint = recipe.out / "checkpoints" / "checkpoint-10"
    weight = "prototype_head.prototypes"
    poison = poisoned(weight, 20, float("inf"), after_update=True)
    with poison, pytest.raises(PrismError) as error:
        train(recipe)
    assert f"the weight {weight} is not finite after step 20" in str(error.value)
    assert f"{checkpoint} (step 10)" in str(error.value)
    assert list_checkpoints(checkpoint.parent) == [checkpoint]
    assert_recovers(settings, straight)


def test_the_same_before_the_first_checkpoint_says_that_there_is_none(settings):
    poison = poisoned("model.lm_head.weight", 3, float("nan"))
    with poison, pytest.raises(PrismError, match=r"step 3.*No checkpoint was written before"):
        train(build_recipe(settings))


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
        "data.packing": "padded",
        "data.documents": 20,
        "optimizer.learning_rate_length": 8,
        "epochs": 3,
        "noise_weight": {"initial": 0.2},
        "uncertainty.rows": 9,
        "uncertainty.deviation": 0.5,
        "uncertainty.signal": "shuffled",
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
    with pytest.raises(InputError, match=f'device: "mps" → "{device}"'):
        train(recipe, resume=True)


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


def test_two_processes_cannot_write_to_one_directory(settings, tmp_path):
    settings["evaluation"]["every"] = 0
    process, path, checkpoints = start(settings, tmp_path, 200)
    try:
        # It holds its lock while it stands still, and takes no time from the other.
        process.send_signal(signal.SIGSTOP)
        second = CliRunner().invoke(app, ["train", str(path), "--resume"])
        assert second.exit_code == 2
        assert f"another run, process {process.pid}." in second.stderr
        assert "Traceback" not in second.stderr
        recipe = build_recipe(yaml.safe_load(path.read_text()))
        with pytest.raises(InputError, match=f"another run, process {process.pid}"):
            train(recipe)
        before = step_of(latest_checkpoint(checkpoints))
        process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 120
        while step_of(latest_checkpoint(checkpoints)) == before:
            assert process.poll() is None, "the first run goes on unharmed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate(timeout=240)
    # The kernel has given the lock back, though the file is still there.
    assert (Path(settings["out"]) / ".lock").read_text() == f"{process.pid}\n"
    done = step_of(latest_checkpoint(checkpoints))
    with pytest.raises(TrainingInterrupted) as stop:
        train(recipe, resume=True, progress=InterruptAfter(2))
    assert step_of(stop.value.checkpoint) > done
    assert not (recipe.out / ".lock").exists()


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


def test_what_a_kill_leaves_behind_is_cleaned_up(settings, tmp_path):
    settings["evaluation"]["every"] = 0
    process, path, checkpoints = start(settings, tmp_path, 2000)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    out = checkpoints.parent
    (checkpoints / ".writing-1" / "checkpoint-9").mkdir(parents=True)
    (checkpoints / ".deleting-1").mkdir()
    (out / ".model.tmp").mkdir()
    (out / ".model.tmp" / "model.safetensors").write_text("half")
    (out / ".training.jsonl.0123abcd.tmp").write_text("half")
    recipe = build_recipe(yaml.safe_load(path.read_text()))
    with pytest.raises(TrainingInterrupted):
        train(recipe, resume=True, progress=InterruptAfter(1))
    assert list(out.rglob(".*")) == []


FILLED_DISK = """
import resource, sys, yaml
from contextlib import contextmanager
from prismlm.training import build_recipe, train
from prismlm.errors import PrismError

class FillAfter:
    left = 15
    @contextmanager
    def task(self, *args):
        yield self
    def advance(self, amount=1):
        self.left -= 1
        if self.left == 0:
            fill()
    def note(self, text):
        pass

def fill():
    how, size = sys.argv[2:]
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    else:
        import pathlib, shutil
        free = shutil.disk_usage(recipe.out).free
        (recipe.out.parent / "ballast").write_bytes(bytes(free - int(size)))

recipe = build_recipe(yaml.safe_load(open(sys.argv[1])))
try:
    train(recipe, progress=FillAfter())
except PrismError as error:
    sys.exit(f"error: {error}")
"""


def filled(settings, tmp_path, *fill, prefix=()):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    if prefix:
        arguments = [*prefix, sys.executable, "-c", FILLED_DISK, str(path), *fill]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    else:
        done = forked.run(path, *fill, code=FILLED_DISK)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def assert_only_the_older_checkpoint_is_left(out, message):
    checkpoints = out / "checkpoints"
    assert "a checkpoint in" in message
    assert f"The last good checkpoint is {checkpoints / 'checkpoint-10'} (step 10)" in message
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-10"]
    assert not (out / "prismlm.json").exists()


# The tensors of the model; its optimizer state, beyond the size of the tensors.
@pytest.mark.parametrize("size", [20_000, 400_000])
def test_a_write_that_fails_leaves_the_checkpoint_before(settings, straight, tmp_path, size):
    message = filled(settings, tmp_path, "limit", str(size))
    assert "os error 27" in message or "inline_container" in message
    assert_only_the_older_checkpoint_is_left(Path(settings["out"]), message)
    assert_recovers(settings, straight)


def can_mount():
    probe = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
    )
    return probe.returncode == 0


@pytest.mark.skipif(
    shutil.which("unshare") is None or not can_mount(), reason="no file system can be mounted"
)
@pytest.mark.parametrize(
    ("left", "cause"),
    [
        (100_000, "the disk is full"),
        pytest.param(1_000_000, "rror 28|inline_container", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_leaves_the_checkpoint_before(settings, straight, tmp_path, left, cause):
    """A file system of its own, that only the process under test and its children see."""
    small = tmp_path / "small"
    small.mkdir()
    settings["out"] = str(small / "model")
    # What the process leaves behind is copied to where it can be seen.
    script = f"""
        mount -t tmpfs -o size=8m tmpfs {small} || exit 9
        "$@"; status=$?
        cp -r {small}/model {tmp_path}/kept; exit $status
    """
    prefix = ("unshare", "-rm", "sh", "-c", script, "sh")
    message = filled(settings, tmp_path, "ballast", str(left), prefix=prefix)
    assert re.search(cause, message)
    assert "MB are free" in message
    shutil.move(tmp_path / "kept", small / "model")
    assert_only_the_older_checkpoint_is_left(small / "model", message)
    assert_recovers(settings, straight)
