"""Two real processes against one with as many rows a step."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from tests.helpers import forked
from tests.helpers.micro_batches import WEIGHTS, assert_same, split, uneven_rows
from tests.helpers.spread_runs import (
    ONE_PASS,
    TWO_PASSES,
    assert_same_history,
    base_settings,
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
    with pytest.raises(InputError, match="processes: 2 → 1"):
        train(build_recipe(settings), resume=True)
