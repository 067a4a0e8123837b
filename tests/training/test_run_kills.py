"""Runs that are killed at a chosen moment and resumed: every file is that of the straight run."""

import re
import shutil
import signal

import pytest
import yaml

from tests.helpers import forked

# Kills itself when the first file or directory of this path is about to be renamed.
KILLED = """
import os, signal, sys
import prismlm.cli.app
end, path = sys.argv.pop(), sys.argv.pop()
def kill(event, values):
    if event == "os.rename" and str(values[("from", "to").index(end)]) == path:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
prismlm.cli.app.main()
"""
# The one figure of a clock; the first log of a process has none.
PACE = re.compile(rb',\s*"tokens_per_second": [^,}\s]+')


def contents(out):
    return {
        str(path.relative_to(out)): PACE.sub(b"", path.read_bytes())
        for path in out.rglob("*")
        if path.is_file()
    }


def command(*words, code=forked.COMMAND):
    done = forked.run("train", *words, code=code)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """A run that nothing happens to, of a model whose layers are logged: its directory and files.

    Checkpoints say where they are, so the others use its directory.
    """
    out = tmp_path_factory.mktemp("killed") / "model"
    sizes = {"model_type": "prismlm_signal_noise", "hidden_size": 16, "head_size": 4}
    own = {
        "out": str(out),
        "model": sizes | {"num_hidden_layers": 1},
        "steps": 12,
        "checkpoint": {"every": 4},
        "evaluation": same_settings["evaluation"] | {"every": 0},
    }
    out.with_suffix(".yaml").write_text(yaml.safe_dump(same_settings | own))
    assert command(out.with_suffix(".yaml")) == 0
    return out, contents(out)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        # The optimizer in the only checkpoint has no state of the head, which is placed at step 5.
        ("training.jsonl", "to"),
        # The last checkpoint is there, and so is the one that it displaces.
        ("checkpoints/checkpoint-4", "from"),
        # The last checkpoint is there, and the rows of the last step's gradients are not.
        ("heads.csv", "to"),
    ],
)
def test_a_killed_run_ends_with_the_files_of_the_straight_one(straight, path, end):
    out, expected = straight
    recipe = out.with_suffix(".yaml")
    shutil.rmtree(out)
    assert command(recipe, out / path, end, code=KILLED) == -signal.SIGKILL
    assert command(recipe, "--resume") == 0
    found = contents(out)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
