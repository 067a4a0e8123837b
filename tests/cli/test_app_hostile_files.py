"""Files and places that somebody made to do harm, or that the system refuses: one message each."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.forked import PYTHONPATH

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000
FULL = "/dev/full"


def edited(tiny_model, directory, name, value):
    """Return a copy of the model in which a file holds something else, or one more setting."""
    model = directory / "model"
    shutil.copytree(tiny_model, model)
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


PANICS = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}


@pytest.mark.parametrize("command", [("explain", "MODEL", "a"), ("corpus", "build", "TEXT")])
def test_a_tokenizer_that_panics(prism, tiny_model, tmp_path, command):
    model, text = edited(tiny_model, tmp_path, "tokenizer.json", PANICS), tmp_path / "a.txt"
    text.write_text("The patient.")
    options = ("--out", tmp_path / "corpus", "--tokenizer", model) if "TEXT" in command else ()
    places = {"MODEL": model, "TEXT": text}
    result = prism(*(places.get(one, one) for one in command), *options)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    said = result.stderr.splitlines()[-1]
    assert said.startswith("error: ")
    assert str(model) in said
    assert "chunk size must be non-zero" in said


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000], ids=["name", "path"])
@pytest.mark.parametrize(
    "command",
    [
        ("explain", "PATH", "a"),
        ("explain", "MODEL", "--file", "PATH"),
        ("explain", "MODEL", "a", "--html", "PATH.html"),
        ("explain", "MODEL", "a", "--lens", "PATH"),
        ("corpus", "build", "PATH", "--out", "OUT"),
        ("corpus", "info", "PATH"),
        ("audit", "MODEL", "PATH"),
        ("train", "PATH"),
        ("attach", "PATH", "--corpus", "OUT", "--out", "OUT"),
        ("index", "MODEL", "--corpus", "PATH"),
    ],
    ids=" ".join,
)
def test_a_path_that_is_too_long(refused, tiny_model, tmp_path, command, name):
    places = {"MODEL": tiny_model, "PATH": name, "PATH.html": f"{name}.html"}
    places["OUT"] = tmp_path / "out"
    said = refused(*(places.get(one, one) for one in command))
    assert said.startswith("error: ")


def test_what_unpacks_without_end(refused, tiny_model, tmp_path):
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb", 1) as file:
        file.write(f'{{"text": "{"a" * 10**6}"}}\n'.encode() * 40)
    for command in (
        ("corpus", "build", bomb, "--out", tmp_path / "out"),
        ("explain", tiny_model, "--file", bomb),
    ):
        assert f"{bomb} unpacks to more than" in refused(*command)
    assert "/dev/zero is larger than" in refused("explain", tiny_model, "--file", "/dev/zero")


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [("--help",), ("--version",), ("corpus", "info", "CORPUS")])
def test_an_output_that_is_full(tiny_corpus, command):
    with open(FULL, "wb") as full:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "prismlm",
                *(str(tiny_corpus) if c == "CORPUS" else c for c in command),
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written: No space left on device.\n"
