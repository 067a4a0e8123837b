"""Commands under torchrun and accelerate launch: in parts, or refused with the way out."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.helpers import forked
from tests.helpers.spread_runs import base_settings

TORCHRUN = "-m torch.distributed.run --nproc-per-node 2"
ON_GPUS = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0"
ON_CPU = "-m accelerate.commands.launch --cpu --num_processes 2"
PLAIN = "--num_machines 1 --mixed_precision no --dynamo_backend no"


def told(*arguments, **environment):
    """Run the command in a process with what a launcher would tell it."""
    code = f"import os; os.environ |= {environment!r}\n" + forked.COMMAND
    return forked.run(*arguments, code=code)


@pytest.mark.parametrize(
    "arguments",
    [
        ("attach", "model", "--corpus", "corpus", "--out", "out"),
        ("audit", "model", "text.txt"),
        ("corpus", "build", "text.txt", "--out", "out"),
        ("eval", "judge", "model", "text.txt"),
        ("explain", "model", "The"),
        ("train", "recipe.yaml", "--dry-run"),
        ("train", "recipe.yaml", "--search"),
        ("index", "model", "--corpus", "corpus", "--dry-run"),
    ],
    ids=" ".join,
)
def test_what_runs_in_one_process_is_refused_in_several(arguments):
    for rank in "01":
        done = told(*arguments, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        assert done.returncode == 2
        assert done.stdout == ""
        # One of them speaks.
        assert ("without torchrun" in done.stderr) == (rank == "0")
        assert f"prismlm {arguments[0]}" in done.stderr or rank == "1"


def test_one_process_of_several_that_accelerate_does_not_start_is_refused():
    told_by_accelerate = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    done = told("train", "recipe.yaml", **told_by_accelerate)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m prismlm train" in done.stderr
    # One process that was asked for, and one of torchrun's alone, do the work.
    for alone in ({"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        assert "recipe.yaml" in told("train", "recipe.yaml", **alone).stderr


def launched(launcher, *arguments):
    environment = {**os.environ, "PYTHONPATH": forked.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    words = launcher.split() + (PLAIN.split() if "accelerate" in launcher else [])
    return subprocess.run(
        [sys.executable, *words, "-m", "prismlm", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_real_launchers_train_the_same_tokens_or_are_refused(tiny_corpus, tmp_path):
    settings = base_settings(tiny_corpus) | {"steps": 4}
    settings |= {"evaluation": {"every": 0, "final_tokens": 1000}}
    found = {}
    for name, launcher in (("torchrun", TORCHRUN), ("accelerate", ON_GPUS)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(settings | {"out": str(tmp_path / name)}))
        done = launched(launcher, "train", recipe, "--json")
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)["tokens"]
    assert found["torchrun"] == found["accelerate"]
    refused = launched(ON_CPU, "train", recipe)
    assert refused.returncode != 0
    assert "torchrun --nproc-per-node N -m prismlm train" in refused.stderr
    corpus = tmp_path / "corpus"
    (tmp_path / "text.txt").write_text("A text.")
    for launcher in (TORCHRUN, ON_GPUS):
        done = launched(launcher, "corpus", "build", tmp_path / "text.txt", "--out", corpus)
        assert done.returncode != 0
        assert done.stderr.count("error: prismlm corpus runs in one process") == 1
        assert not corpus.exists()
