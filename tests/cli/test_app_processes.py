"""Commands under torchrun and accelerate launch: in parts, or refused with the way out."""

import pytest

from tests.helpers import forked


def run(*arguments, **environment):
    """Run the command in a process with the environment that a launcher sets."""
    code = f"import os; os.environ |= {environment!r}\n" + forked.COMMAND
    return forked.run(*arguments, code=code)


@pytest.mark.parametrize(
    "arguments",
    [
        ("attach", "model", "--corpus", "corpus", "--out", "out", "--dry-run"),
        ("corpus", "build", "text.txt", "--out", "out"),
        ("eval", "judge", "model", "text.txt"),
        ("explain", "model", "The"),
        ("train", "recipe.yaml", "--dry-run"),
        ("train", "recipe.yaml", "--search"),
        ("index", "model", "--corpus", "corpus", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_of_one_process_are_refused_in_several(arguments):
    for rank in "01":
        done = run(*arguments, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        assert (done.returncode, done.stdout) == (2, "")
        # Only the first process prints.
        assert ("without torchrun" in done.stderr) == (rank == "0")
        assert f"prismlm {arguments[0]}" in done.stderr or rank == "1"


def test_processes_that_accelerate_does_not_connect_are_refused():
    unconnected = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    done = run("train", "recipe.yaml", **unconnected)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m prismlm train" in done.stderr
    # One process of accelerate or torchrun does the work.
    for alone in ({"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        assert "recipe.yaml" in run("train", "recipe.yaml", **alone).stderr
