"""prismlm eval judge: what a person reads, what a program reads, clear refusals, and a kill."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.chat_server import ChatServer

NAMED = ("--endpoint-model", "m")
FEW = ("--prompts-count", 4, "--prompt-words", 8, "--new-tokens", 8)


def first(request, number):
    return {"verdict": "A"}


@pytest.fixture(scope="module")
def other(tiny_model, tmp_path_factory):
    """The tiny model with other weights, whose name drives a terminal."""
    path = tmp_path_factory.mktemp("judge") / "other\x1b[31m"
    shutil.copytree(tiny_model, path, ignore=shutil.ignore_patterns("lens", "prism*", "proto*"))
    weights = load_file(path / "model.safetensors")
    changed = {name: value.flip(0) for name, value in weights.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_an_unusable_judge_is_said_first_and_its_ratings_are_not_to_be_read(
    prism, tiny_model, tiny_corpus, other, tmp_path
):
    out = tmp_path / "out"
    with ChatServer(first) as server:
        asked = ["--endpoint", server.url, "--endpoint-model", "m", "--out", out]
        command = ["eval", "judge", tiny_model, other, "--corpus", tiny_corpus, *FEW, *asked]
        made = prism(*command)
        assert made.returncode == 0, made.stderr
        asked_then = len(server.requests)
        again = prism(*command, "--json")
        assert len(server.requests) == asked_then <= 32
    assert made.stdout.startswith("The judge endpoint:m is unusable: it must prefer real text")
    assert "\x1b[31m" not in made.stdout + made.stderr
    found = json.loads(again.stdout)
    assert found == json.loads((out / "judge.json").read_text())
    assert found["judge"]["order"]["by_position"]["value"] == 1
    assert [one["bradley_terry"]["value"] for one in found["ratings"]["models"]] == [1000, 1000]


def test_lines_of_a_file_are_continued_without_a_judge(prism, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nThe court ruled\n")
    made = prism("eval", "judge", model, "--prompts", prompts, "--new-tokens", 4)
    assert made.returncode == 0, made.stderr
    assert "2 prompts, 1 models" in made.stdout
    assert "BLEU" not in made.stdout
    kept = model / "eval" / "judge"
    (part,) = (kept / "continuations").iterdir()
    assert len(json.loads(part.read_text())) == 2
    assert (kept / "continuations.parquet").is_file()
    changed = prism("eval", "judge", model, "--prompts", prompts, "--new-tokens", 5)
    assert changed.returncode == 2
    assert "tokens: 4 → 5" in changed.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prompts", "f"], "give a MODEL or more; without one, a judge to examine and --out"),
        (["m"], "--corpus DIR or --prompts FILE, one of them"),
        (["m", "--corpus", "c", "--prompts", "f"], "one of them"),
        (["m", "--prompts", "none.txt"], "there is no file none.txt"),
        (["m", "--prompts", "f", "--endpoint", "http://host/v1"], "go together"),
        (["m", "--prompts", "f", "--endpoint", "ftp://host", "--endpoint-model", "m"], "http"),
        (
            ["m", "--prompts", "f", "--judge", "j", "--endpoint", "http://h/v1", *NAMED],
            "are two judges: give one",
        ),
        (["m", "--prompts", "f", "--by", "typical"], "name it by --judge DIR"),
        (["m", "--prompts", "f", "--prompts-count", "1"], "'--prompts-count'"),
        (["m", "m", "--prompts", __file__], "is given twice"),
    ],
)
def test_what_cannot_be_is_refused(refused, given, message):
    assert message in refused("eval", "judge", *given)


def test_what_cannot_be_opened_leaves_nothing_behind(refused, tiny_model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three\nfour five six\n")
    given = ("--prompts", prompts, "--prompt-words", 2, "--new-tokens", 2)
    missing, judge = tmp_path / "missing", tmp_path / "no judge"
    assert f"there is no model directory {missing}" in refused("eval", "judge", missing, *given)
    asked = ("--judge", judge, "--out", tmp_path / "out")
    assert str(judge) in refused("eval", "judge", tiny_model, *given, *asked)
    assert [path.name for path in tmp_path.iterdir()] == [prompts.name]
