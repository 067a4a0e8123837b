"""prismlm label: names a person reads, a document that a program reads, and clear refusals."""

import json
import shutil
import socket

import pytest

from prismlm.lens.labels.map import regions
from tests.helpers.chat_server import ChatServer, good
from tests.helpers.named_lens import named_model


@pytest.fixture(scope="module")
def copy(tiny_model, tmp_path_factory):
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("label") / "model")


def test_names_are_made_shown_and_used(prism, refused, copy):
    made = prism("label", copy)
    assert made.returncode == 0, made.stderr
    assert "of 192 prototypes named" in made.stdout
    assert "shuffled" in made.stdout
    assert "→" in made.stdout
    assert "already" in refused("label", copy)
    again = prism("label", copy, "--overwrite", "--json")
    value = json.loads(again.stdout)
    assert value["source"] == "embedded"
    assert sum(value["categories"].values()) == value["named"]
    explained = prism("explain", copy, "Once upon a time there was a little", "--json")
    position = json.loads(explained.stdout)["positions"][-1]
    names = [one["name"] for one in position["prototypes"] if one["category"]]
    assert any("→" in name or "-" in name for name in names)


def test_a_map_names_its_regions(prism, tiny_model, tmp_path):
    lm = named_model(tiny_model, tmp_path / "model")
    named = [region._asdict() for region in regions(lm.lens)]
    assert json.loads(prism("map", lm.path, "--json").stdout)["regions"] == named
    told = prism("map", lm.path)
    assert told.returncode == 0, told.stderr
    assert "regions" in told.stdout


@pytest.fixture(scope="module")
def asked(tiny_model, tmp_path_factory):
    """Another copy, for an endpoint to name."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("asked") / "model")


def files(model):
    return {path: path.read_bytes() for path in (model / "lens").rglob("*") if path.is_file()}


def test_a_language_model_names(prism, asked):
    with ChatServer() as server:
        given = ["--endpoint", server.url, "--endpoint-model", "m\x1b[31m", "--prototypes", "5"]
        made = prism("label", asked, *given, "--overwrite")
    assert made.returncode == 0, made.stderr
    said = " ".join(made.stdout.split())
    for part in ("named 5", "requests 10", "tokens in 1,000", "tokens out 100"):
        assert part in said
    assert "\x1b[31m" not in made.stdout + made.stderr


def test_names_in_another_language_are_said_to_tell_nothing_by_their_words(prism, asked):
    foreign = {"name": "医学术语", "description": "关于疾病与治疗的词语", "role": "名词"}

    def answer(request, number):
        return {key: foreign.get(key, value) for key, value in good(request).items()}

    with ChatServer(answer) as server:
        given = ["--endpoint", server.url, "--endpoint-model", "foreign", "--prototypes", "30"]
        made = prism("label", asked, *given, "--overwrite")
    assert made.returncode == 0, made.stderr
    assert "named 30" in " ".join(made.stdout.split())
    assert "another language than the corpus" in " ".join(made.stdout.split())


def test_a_server_that_is_down_is_told(prism, asked):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    before = files(asked)
    given = ["--endpoint", url, "--endpoint-model", "m", "--overwrite", "--json"]
    done = prism("label", asked, *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {url}: it cannot be reached" in done.stderr
    assert files(asked) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--endpoint", "http://host/v1"], "go together"),
        (["--endpoint-model", "m"], "go together"),
        (["--prototypes", "3"], "goes with --endpoint"),
        (["--endpoint", "host:80", "--endpoint-model", "m"], "expected a URL such as"),
        (["--concurrency", "0"], "'--concurrency'"),
    ],
)
def test_options_that_do_not_fit_are_refused(refused, given, message):
    assert message in refused("label", "no such model", *given)
