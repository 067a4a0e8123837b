"""Malicious files, places that the system refuses, and processes of launchers."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import forked

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000
FULL = "/dev/full"


def edited(tiny_model, directory, name, value):
    """Return a copy of the model with a file replaced, or with more settings in it."""
    model = shutil.copytree(tiny_model, directory / "model")
    (path,) = model.rglob(name)
    if isinstance(value, dict):
        value = json.dumps(json.loads(path.read_text(encoding="utf-8")) | value)
    elif value == HUGE:
        value = path.read_text(encoding="utf-8").replace("{", f'{{"x": {HUGE},', 1)
    path.write_text(value, encoding="utf-8")
    return model


@pytest.mark.parametrize("value", [DEEP, HUGE], ids=["deep", "huge"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "prismlm.json", "meta.json"]
)
def test_json_of_a_model_directory(refused, tiny_model, tmp_path, name, value):
    model = edited(tiny_model, tmp_path, name, value)
    assert str(model) in refused("explain", model, "The patient")


def test_a_tokenizer_that_panics(refused, tiny_model, tmp_path):
    panics = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    model, text = edited(tiny_model, tmp_path, "tokenizer.json", panics), tmp_path / "a.txt"
    text.write_text("The patient.")
    for command in (
        ("explain", model, "a"),
        ("corpus", "build", text, "--out", tmp_path / "corpus", "--tokenizer", model),
    ):
        message = refused(*command)
        assert str(model) in message
        assert "chunk size must be non-zero" in message


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000], ids=["name", "path"])
@pytest.mark.parametrize(
    "command",
    [
        ("explain", "PATH", "a"),
        ("explain", "MODEL", "--file", "PATH"),
        ("explain", "MODEL", "a", "--html", "PATH.html"),
        ("corpus", "build", "PATH", "--out", "OUT"),
        ("train", "PATH"),
        ("index", "MODEL", "--corpus", "PATH"),
    ],
    ids=" ".join,
)
def test_a_path_that_is_too_long(refused, tiny_model, tmp_path, command, name):
    places = {"MODEL": tiny_model, "PATH": name, "PATH.html": f"{name}.html"}
    places["OUT"] = tmp_path / "out"
    refused(*(places.get(word, word) for word in command))


def test_a_file_without_end(refused, tiny_model):
    assert "/dev/zero is larger than" in refused("explain", tiny_model, "--file", "/dev/zero")


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [("--help",), ("corpus", "info", "CORPUS")])
def test_an_output_that_is_full(tiny_corpus, command):
    words = [str(tiny_corpus) if word == "CORPUS" else word for word in command]
    environment = {**os.environ, "PYTHONPATH": forked.PYTHONPATH}
    with open(FULL, "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "prismlm", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False,
        )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written: No space left on device.\n"


# -- under torchrun and accelerate launch


def launched(*arguments, **environment):
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
