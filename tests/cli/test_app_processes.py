"""Commands under torchrun and accelerate launch: in parts, or refused with the way out."""

import pytest

from tests.helpers import forked


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


def test_one_process_of_several_that_accelerate_does_not_connect_is_refused():
    unconnected = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    done = told("train", "recipe.yaml", **unconnected)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m prismlm train" in done.stderr
    # One process that was asked for, and one of torchrun's alone, do the work.
    for alone in ({"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        assert "recipe.yaml" in told("train", "recipe.yaml", **alone).stderr
