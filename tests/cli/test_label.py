"""prismlm label: names a person reads, a document that a program reads, and clear refusals."""

import json
import shutil
import signal
import socket
import time

import pytest

from prismlm.labels.map import regions
from tests.helpers import forked
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
    assert "Regions: " in told.stdout


@pytest.fixture(scope="module")
def asked(tiny_model, tmp_path_factory):
    """Another copy, for an endpoint to name."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("asked") / "model")


def files(model):
    return {path: path.read_bytes() for path in (model / "lens").rglob("*") if path.is_file()}


def test_a_run_that_was_killed_goes_on(asked):
    def slowly(request, number):
        time.sleep(0.03)
        return good(request)

    (lens,) = (path for path in (asked / "lens").iterdir() if path.is_dir())
    answers = lens.with_name(f".{lens.name}.answers.jsonl")
    before, kept = files(asked), 0
    with ChatServer(slowly) as server:
        given = ["--endpoint", server.url, "--endpoint-model", "m", "--concurrency", "3"]
        command = ["label", asked, *given, "--prototypes", "40", "--overwrite", "--json"]
        for ending, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            server.requests.clear()
            process = forked.start(*command)
            while len(server.requests) < 20:
                assert process.poll() is None, process.communicate(1)
                time.sleep(0.002)
            process.send_signal(ending)
            _, stderr = process.communicate(20)
            assert process.returncode == code
            assert {path: files(asked)[path] for path in before} == before
            kept, last = answers.read_bytes().count(b"\n"), kept
            assert kept >= last + 15
        assert f"The answers so far are kept in {answers}" in stderr
        server.requests.clear()
        done = forked.run(*command)
    assert done.returncode == 0, done.stderr
    assert len(server.requests) == 80 - kept
    assert json.loads(done.stdout)["asked"]["named"] == 40


def test_a_language_model_names(prism, asked):
    with ChatServer() as server:
        given = ["--endpoint", server.url, "--endpoint-model", "m\x1b[31m", "--prototypes", "5"]
        made = prism("label", asked, *given, "--overwrite")
    assert made.returncode == 0, made.stderr
    assert "5 named by the endpoint: 10 answers, 1,000 tokens in, 100 out" in made.stdout
    assert "These names beside the embedded ones" in made.stdout
    assert "\x1b[31m" not in made.stdout + made.stderr


def test_names_in_another_language_are_said_to_tell_nothing_by_their_words(prism, asked):
    foreign = {"name": "医学术语", "description": "关于疾病与治疗的词语", "role": "名词"}

    def answer(request, number):
        return {key: foreign.get(key, value) for key, value in good(request).items()}

    with ChatServer(answer) as server:
        given = ["--endpoint", server.url, "--endpoint-model", "foreign", "--prototypes", "30"]
        made = prism("label", asked, *given, "--overwrite")
    assert made.returncode == 0, made.stderr
    assert "30 named by the endpoint" in made.stdout
    assert "another language than the corpus" in " ".join(made.stdout.split())


def test_an_endpoint_that_names_nothing_leaves_the_lens_as_it_was(prism, asked):
    before = files(asked)

    def answer(request, number):
        return good(request) | {"name": " "}

    with ChatServer(answer) as server:
        given = ["--endpoint", server.url, "--endpoint-model", "silent", "--prototypes", "30"]
        done = prism("label", asked, *given, "--overwrite")
    assert (done.returncode, done.stdout) == (2, "")
    assert "empty or out of range" in done.stderr
    assert {path: files(asked)[path] for path in before} == before


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
