"""Damaged files, a full disk, and processes of launchers."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import forked

FULL = "/dev/full"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("config.json", "[" * 100_000 + "]" * 100_000, "model cannot be read"),
        ("tokenizer.json", {"type": "FixedLength", "length": 0}, "chunk size must be non-zero"),
    ],
)
def test_a_damaged_model_directory(refused, tiny_model, tmp_path, name, value, words):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / name
    if isinstance(value, dict):
        value = json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": value})
    path.write_text(value)
    assert words in refused("explain", model, "The patient")


@pytest.mark.skipif(not Path(FULL).is_char_device(), reason="needs a device that is always full")
def test_an_output_that_is_full(tiny_corpus):
    full = f"import os; os.dup2(os.open('{FULL}', os.O_WRONLY), 1)\n"
    done = forked.run("corpus", "info", tiny_corpus, code=full + forked.COMMAND)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be used: No space left on device.\n"


# -- under torchrun and accelerate launch


def launched(*arguments, **environment):
    """Run the command in a process with the environment that a launcher sets."""
    code = f"import os; os.environ |= {environment!r}\n" + forked.COMMAND
    return forked.run(*arguments, code=code)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "model", "The"),
        ("train", "recipe.yaml", "--search"),
        ("index", "model", "--corpus", "corpus", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_of_one_process_are_refused_in_several(arguments):
    for rank in "01":
        done = launched(*arguments, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        assert (done.returncode, done.stdout) == (2, "")
        # Only the first process prints.
        assert ("without torchrun" in done.stderr) == (rank == "0")
        assert f"prismlm {arguments[0]}" in done.stderr or rank == "1"


def test_processes_that_accelerate_does_not_connect_are_refused():
    unconnected = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    done = launched("train", "recipe.yaml", **unconnected)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m prismlm train" in done.stderr
    # One process of accelerate or torchrun does the work.
    for alone in ({"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        assert "recipe.yaml" in launched("train", "recipe.yaml", **alone).stderr
