"""Two real processes against one with as many rows a step; the slow tests start torchrun itself."""

import json
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from prismlm.training.checkpoints import latest_checkpoint, step_of
from tests.helpers import forked
from tests.helpers.micro_batches import WEIGHTS, assert_same, split, uneven_rows
from tests.helpers.spread_runs import (
    ONE_PASS,
    TWO_PASSES,
    assert_same_history,
    base_settings,
    command,
)
from tests.helpers.tiny_head import make
from tests.helpers.two_processes import gradients_of


def rows_between(*bounds):
    everything = uneven_rows()
    return [{k: v[first:last] for k, v in everything.items()} for first, last in bounds]


def runs_of(corpus, directory):
    """Return name, settings and the step that Ctrl-C is pressed after, or 0."""
    base = base_settings(corpus)
    only = {"prototype_only_ce": 0.5}
    detached = {
        "head": base["head"] | {"detach": True, "position_share": 0.5},
        "losses": base["losses"] | only,
        "batch_size": 2,
        "gradient_accumulation": 2,
    }
    sharded = {"parallel": "fsdp2", "losses": base["losses"] | only}
    changes = [("ddp", {}, 0), ("detached", detached, 0), ("fsdp2", sharded, 4)]
    return [
        (name, base | change | {"out": str(directory / name)}, stop)
        for name, change, stop in changes
    ]


@pytest.fixture(scope="module")
def launched(tiny_corpus, tmp_path_factory):
    """Run everything in two processes at once: starting them is what takes time."""
    directory = tmp_path_factory.mktemp("processes")
    gradients = {
        f"{kind} {passes}": (
            {"weights": WEIGHTS, "detach": kind == "detached"},
            [rows_between(*mine) for mine in rows],
        )
        for kind in ("attached", "detached")
        for passes, rows in (("once", ONE_PASS), ("twice", TWO_PASSES))
    }
    runs = runs_of(tiny_corpus, directory)
    jobs = pickle.dumps({"gradients": gradients, "runs": runs})
    (directory / "jobs.pickle").write_bytes(jobs)
    worker = Path(__file__).parents[1] / "helpers" / "two_processes.py"
    done = forked.run_script(worker, directory)
    assert done.returncode == 0, done.stderr
    results = [pickle.loads((directory / f"rank-{i}.pickle").read_bytes()) for i in (0, 1)]
    return {name: settings for name, settings, _ in runs}, results


def in_one_process(sizes, detach):
    return gradients_of(make(weights=WEIGHTS, detach=detach), split(uneven_rows(), *sizes))


@pytest.mark.parametrize("kind", ["attached", "detached"])
@pytest.mark.parametrize(("passes", "sizes"), [("once", [4, 4]), ("twice", [2, 2, 2, 2])])
def test_two_processes_have_the_gradient_of_one(launched, kind, passes, sizes):
    gradients, losses = in_one_process(sizes, detach=kind == "detached")
    for rank in (0, 1):
        assert_same(gradients, launched[1][rank][f"{kind} {passes}"][0])
        assert_same(losses, launched[1][rank][f"{kind} {passes}"][1])


@pytest.mark.parametrize("name", ["ddp", "detached", "fsdp2"])
def test_a_run_in_two_processes_is_the_run_in_one(launched, name, tmp_path):
    settings, (first, second) = launched
    here = settings[name] | {"out": str(tmp_path / "one"), "parallel": "auto"}
    # The same passes, one after another: R1 is a mean over them.
    passes = 2 * here.get("gradient_accumulation", 1)
    reference = train(build_recipe(here | {"gradient_accumulation": passes}))
    history, quality, tokens = first[name]
    assert_same_history(reference.history, history)
    assert tokens == second[name][2] == reference.tokens
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-5)
    assert quality.prototype_only_ce == pytest.approx(reference.quality.prototype_only_ce, rel=1e-5)
    out = Path(settings[name]["out"])
    for file in ("model.safetensors", "prototype_head.safetensors"):
        ours, theirs = load_file(out / file), load_file(reference.directory / file)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=2e-6, msg=key)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_both_processes_stopped_at_the_same_step(launched):
    stopped = [results["fsdp2 stopped"] for results in launched[1]]
    assert stopped[0] == stopped[1]
    assert stopped[0] in ("checkpoint-4", "checkpoint-5")


def test_only_one_process_wrote(launched):
    out = Path(launched[0]["ddp"]["out"])
    checkpoints = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-12", "checkpoint-6"]
    rows = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert rows == launched[1][0]["ddp"][0]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert (out / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").is_file()


def test_another_number_of_processes_does_not_resume(launched):
    settings = launched[0]["ddp"]
    with pytest.raises(InputError, match="begun with 2 processes, and these are 1"):
        train(build_recipe(settings), resume=True)


def wait_for_checkpoint(process, directory, step):
    deadline = time.monotonic() + 120
    while (newest := latest_checkpoint(directory)) is None or step_of(newest) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_command_stopped_and_resumed_is_the_straight_run(
    tiny_corpus, tmp_path, ending, parallel
):
    settings = base_settings(tiny_corpus) | {"parallel": parallel, "steps": 60}
    settings |= {"checkpoint": {"every": 1}, "evaluation": {"every": 0, "final_tokens": 1000}}
    settings["model"]["attention_dropout"] = 0.1
    outs = [tmp_path / "straight", tmp_path / "stopped"]
    paths = [tmp_path / f"{out.name}.yaml" for out in outs]
    for out, path in zip(outs, paths, strict=True):
        path.write_text(yaml.safe_dump(settings | {"out": str(out)}))
    straight = subprocess.run(command(paths[0], "--json"), capture_output=True, text=True)
    assert straight.returncode == 0, straight.stderr
    assert json.loads(straight.stdout)["steps"] == 60
    process = subprocess.Popen(
        command(paths[1]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_checkpoint(process, outs[1] / "checkpoints", 10)
    if ending == signal.SIGINT:
        process.send_signal(ending)
    else:
        kill_all(process)
    stderr = process.communicate(timeout=120)[1]
    if ending == signal.SIGINT:
        assert stderr.count("--resume") == 1
    assert step_of(latest_checkpoint(outs[1] / "checkpoints")) < 60
    resumed = subprocess.run(command(paths[1], "--resume"), capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    histories = [
        [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
        for out in outs
    ]
    assert_same_history(*histories)
    for file in ("model.safetensors", "prototype_head.safetensors"):
        first, second = (load_file(out / file) for out in outs)
        for key, value in first.items():
            assert torch.equal(value, second[key]), key


def kill_all(process):
    """Kill torchrun and its workers, each in a session of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [process.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
