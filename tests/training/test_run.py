"""Runs from a recipe to a model directory: results, interruptions, failures and wrong input."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.errors import FormatError, InputError, Interrupted, PrismError
from prismlm.models.sidecar import load_sidecar
from prismlm.run_state import writing
from prismlm.training import build_recipe, estimate, train, trainer
from prismlm.training.trainer import PrismTrainer, latest_checkpoint, list_checkpoints, step_of
from tests.helpers import forked
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.runs import assert_same_run, curve, start


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "model"
    return train(build_recipe(same_settings | {"out": str(out)}))


def stopped(settings, steps):
    """Interrupt a run; return its recipe and checkpoint."""
    recipe = build_recipe(settings)
    with pytest.raises(Interrupted) as stop:
        train(recipe, progress=InterruptAfter(steps))
    checkpoint = latest_checkpoint(recipe.out / "checkpoints")
    assert str(checkpoint) in str(stop.value)
    return recipe, checkpoint


def assert_recovers(recipe, straight):
    """Resume a broken run and compare it with an uninterrupted one."""
    resumed = train(recipe, resume=True)
    assert_same_run(recipe.out, straight.directory)
    assert curve(resumed.history) == curve(straight.history)
    assert (resumed.quality, resumed.tokens) == (straight.quality, straight.tokens)


@pytest.mark.parametrize("stop_at", [3, 15])
def test_stopped_and_resumed_is_the_straight_run_bit_for_bit(settings, straight, stop_at):
    recipe, checkpoint = stopped(settings, stop_at)
    # The signal arrives while the step is being ended.
    assert step_of(checkpoint) in (stop_at, stop_at + 1)
    assert_recovers(recipe, straight)


def test_a_run_leaves_model_directories_and_its_history(straight, same_settings):
    out = straight.directory
    recipe = build_recipe(same_settings | {"out": str(out)})
    checkpoints = list_checkpoints(out / "checkpoints")
    assert [path.name for path in checkpoints] == ["checkpoint-20", "checkpoint-30"]
    assert not [*checkpoints[0].parent.glob(".*")]
    assert_same_run(out, checkpoints[-1])
    for directory in (out, checkpoints[-1]):
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert model.config.use_cache
        assert len(AutoTokenizer.from_pretrained(directory)) == model.config.vocab_size
        sidecar = load_sidecar(directory, model)
        provenance = sidecar.provenance
        assert provenance["recipe"] == recipe.to_dict()
        assert provenance["steps"] == 30
        assert provenance["head_placed"]
        assert set(provenance["versions"]) >= {"prismlm", "torch", "transformers"}
        assert provenance["corpus"]["name"] == "sample"
    # What runs are resumed from.
    state = torch.load(checkpoints[-1] / trainer.STATE_FILE, weights_only=True)
    assert torch.equal(state["head"]["prototypes"], sidecar.head.prototypes)
    assert load_sidecar(out).provenance["quality"] == straight.quality.to_dict()
    rows = [json.loads(line) for line in straight.history_file.read_text().splitlines()]
    assert rows == straight.history
    evaluations = {row["step"]: row for row in rows if "eval_ce" in row}
    assert set(evaluations) == {10, 20}
    assert {"eval_prototype_only_ce", "eval_fvu", "eval_in_use"} <= evaluations[20].keys()
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    # Finished runs can be resumed too: nothing is left to do but the figures.
    assert train(recipe, resume=True).quality == straight.quality


def test_a_plain_run_is_the_model_without_its_head(settings, tmp_path):
    settings["head"]["detach"] = True
    with_a_head = train(build_recipe(settings))
    settings["head"]["enabled"] = False
    recipe, _ = stopped(settings | {"out": str(tmp_path / "plain")}, 12)
    plain = train(recipe, resume=True)
    assert plain.quality is None
    assert plain.ce == with_a_head.quality.ce == with_a_head.ce
    names = {path.name for path in recipe.out.iterdir()}
    assert not {"prismlm.json", "prototype_head.safetensors"} & names
    with_head = load_file(with_a_head.directory / "model.safetensors")
    for name, value in load_file(recipe.out / "model.safetensors").items():
        assert torch.equal(value, with_head[name]), name


def test_out_is_never_overwritten_nor_resumed_with_another_recipe(settings):
    settings["steps"] = 6
    recipe = build_recipe(settings)
    recipe.out.mkdir()
    (recipe.out / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match="not written by prismlm train"):
        train(recipe, resume=True)
    (recipe.out / "thesis.tex").unlink()
    busy = f"process, {os.getpid()}"
    with writing(recipe.out, within=True), pytest.raises(InputError, match=busy):
        train(recipe)
    train(recipe)
    with pytest.raises(InputError, match="--resume"):
        train(recipe)
    settings["head"]["prototypes"] = 64
    with pytest.raises(InputError, match=r"head\.prototypes: 48 → 64"):
        train(build_recipe(settings), resume=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_estimate_measures_and_writes_nothing(settings, enabled):
    settings["head"]["enabled"] = enabled
    recipe = build_recipe(settings | {"steps": 1000})
    expected = estimate(recipe)
    figures, each = expected.figures, expected.figures["seconds_per_step"]
    counts = {"steps": 1000, "tokens": 1000 * 4 * 32, "head_parameters": (48 * 32 + 1) * enabled}
    assert figures | counts == figures
    assert 0 < each < 5
    assert expected.seconds == pytest.approx(1000 * each)
    assert expected.disk_bytes > 4 * figures["parameters"]
    assert not recipe.out.exists()


def test_ctrl_c_saves_says_how_to_resume_and_exits_with_130(settings, tmp_path):
    settings["evaluation"]["every"] = 0
    process, path, checkpoints = start(settings, tmp_path, 60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert stdout == ""
    assert "Continue with --resume." in stderr
    assert "Traceback" not in stderr
    assert 1 <= step_of(latest_checkpoint(checkpoints)) < 60
    done = forked.run("train", path, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 60


def test_a_checkpoint_that_cannot_be_read_is_named_with_what_to_do(settings):
    recipe, checkpoint = stopped(settings | {"steps": 8}, 3)
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FormatError, match=rf"{checkpoint} cannot be resumed from .* Delete it"):
        train(recipe, resume=True)


def test_a_killed_run_resumes_from_its_last_whole_checkpoint(settings, straight, tmp_path):
    process, *_ = start(settings, tmp_path, 30)
    process.kill()
    process.communicate(timeout=240)
    left = Path(settings["out"]) / "checkpoints" / ".saving" / "checkpoint-29"
    left.mkdir(parents=True, exist_ok=True)
    assert_recovers(build_recipe(settings), straight)
    assert not left.parent.exists()


@pytest.mark.parametrize(
    ("weight", "step", "value", "message"),
    [
        # The loss is checked with the log after step 16, without a wait in every step.
        ("model.model.norm.weight", 14, math.nan, "training diverged by step 16: the loss is nan"),
        ("prototype_head.prototypes", 20, math.inf, "by step 20: the weight prototype_head"),
    ],
)
def test_a_weight_that_is_not_finite_ends_the_run_and_is_not_saved(
    settings, straight, monkeypatch, weight, step, value, message
):
    class Poisoned(PrismTrainer):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)
            if self.state.global_step == step:
                self.model.get_parameter(weight).data.view(-1)[0] = value

    recipe = build_recipe(settings)
    checkpoint = recipe.out / "checkpoints" / "checkpoint-10"
    with monkeypatch.context() as patched:
        patched.setattr("prismlm.training.run.PrismTrainer", Poisoned)
        with pytest.raises(PrismError) as error:
            train(recipe)
    assert message in str(error.value)
    assert f"The last good checkpoint is {checkpoint} (step 10)" in str(error.value)
    assert "lower optimizer.learning_rate" in str(error.value)
    assert list_checkpoints(checkpoint.parent) == [checkpoint]
    assert not (recipe.out / "prismlm.json").exists()
    assert_recovers(recipe, straight)


FILLED_DISK = f"""
import sys, yaml
sys.path.insert(0, {forked.ROOT!r})
from functools import partial
from prismlm.errors import PrismError
from prismlm.training import build_recipe, train
from tests.helpers.interrupted import limit_files
from tests.helpers.interrupted import InterruptAfter
full = partial(limit_files, int(sys.argv[2]))
try:
    train(build_recipe(yaml.safe_load(open(sys.argv[1]))), progress=InterruptAfter(15, full))
except PrismError as error:
    sys.exit(f"error: {{error}}")
"""


# Bytes that a file may have: too few for optimizer state, and for shards in the background.
@pytest.mark.parametrize(("size", "shards"), [(400_000, False), (20_000, True)])
def test_a_write_that_fails_leaves_the_checkpoint_before(
    settings, straight, tmp_path, size, shards
):
    path, out = tmp_path / "recipe.yaml", Path(settings["out"])
    settings["checkpoint"]["asynchronous"] = shards
    settings["parallel"] = "fsdp2" if shards else "auto"
    path.write_text(yaml.safe_dump(settings))
    done = forked.run(path, str(size), code=FILLED_DISK)
    assert done.returncode == 1, done.stderr
    checkpoint = out / "checkpoints" / "checkpoint-10"
    assert f"The last good checkpoint is {checkpoint} (step 10)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(checkpoint.parent.iterdir()) == [checkpoint]
    assert not (out / "prismlm.json").exists()
    assert_recovers(build_recipe(settings), straight)


@pytest.mark.parametrize("head", [True, False])
def test_a_run_ends_with_perplexity_a_verdict_and_the_next_command(settings, tmp_path, head):
    settings["head"]["enabled"] = head
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings | {"steps": 12}))
    done = CliRunner().invoke(app, ["train", str(path)])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    out, corpus = settings["out"], settings["corpus"]
    assert "Perplexity on held-out text: " in shown
    assert "token frequencies" in shown
    following = f"index {out} --corpus {corpus}"
    if not head:
        following = f"attach {out} --corpus {corpus} --out {out}-attached"
    assert done.stdout.splitlines()[-1].strip() == f"prismlm {following}"
    assert "passes over" not in done.stderr


def test_many_passes_over_few_documents_are_warned_of_at_the_start(settings):
    def stop(text):
        raise Interrupted(text)

    settings["data"]["documents"] = 5
    with pytest.raises(Interrupted) as stopped:
        train(build_recipe(settings | {"steps": 60}), on_warning=stop)
    warning = str(stopped.value)
    assert warning.startswith("6 passes over 5 documents: beyond 4, ")
    # Four passes over 38 rows, of which a step takes four.
    assert warning.endswith("(--set steps=38).")


COMPILED = """
import sys, yaml
from functools import partial
from torch._dynamo.backends.debugging import aot_eager
from prismlm.training import build_recipe, parallel, train
graphs = []
def backend(graph, example_inputs):
    graphs.append(graph)
    return aot_eager(graph, example_inputs)
parallel.compile_blocks = partial(parallel.compile_blocks, backend=backend)
train(build_recipe(yaml.safe_load(open(sys.argv[1]))))
print(len(graphs))
"""


def test_a_compiled_run_is_the_same(settings, tmp_path):
    settings |= {"steps": 8, "logging": {"every": 4, "tensorboard": True}}
    # Passes of few shapes, each of which is compiled.
    settings["evaluation"] = {"every": 0, "final_tokens": 300}
    settings["head"]["initialise"] = "random"
    result = train(build_recipe(settings))
    assert list((result.directory / "tensorboard").iterdir())
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "compiled"
    recipe.write_text(yaml.safe_dump(settings | {"compile": True, "out": str(out)}))
    # A separate process: the run-time type checks of the test run cannot be traced.
    done = forked.run(recipe, code=COMPILED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "the blocks were compiled"
    lines = (out / "training.jsonl").read_text().splitlines()
    for line, expected in zip(lines, result.history, strict=True):
        row = json.loads(line)
        names = [name for name in row if "ce" in name]
        assert [row[n] for n in names] == pytest.approx([expected[n] for n in names], rel=1e-3)
