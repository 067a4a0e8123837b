"""prismlm label and map."""

import shutil
import socket

import pytest

from prismlm.lens.labels.map import regions
from tests.helpers.chat_server import ChatServer, good
from tests.helpers.named_lens import named_model


@pytest.fixture(scope="module")
def copy(tiny_model, tmp_path_factory):
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("label") / "model")


def test_names_are_made_shown_and_used(prism, document, refused, copy):
    shown = prism("label", copy).stdout
    assert "of 192 prototypes named" in shown
    assert "shuffled" in shown
    assert "→" in shown
    assert "already" in refused("label", copy)
    value = document("label", copy, "--overwrite")
    assert value["source"] == "embedded"
    assert sum(value["categories"].values()) == value["named"]
    trace = document("explain", copy, "Once upon a time there was a little")
    uses = trace["positions"][-1]["prototypes"]
    names = [use["name"] for use in uses if use["category"]]
    assert any("→" in name or "-" in name for name in names)


def test_a_map_names_its_regions(prism, document, tiny_model, tmp_path):
    lm = named_model(tiny_model, tmp_path / "model")
    named = [region._asdict() for region in regions(lm.lens)]
    assert document("map", lm.path)["regions"] == named
    assert "regions" in prism("map", lm.path).stdout


@pytest.fixture(scope="module")
def endpoint_model(tiny_model, tmp_path_factory):
    """Another copy, for an endpoint to name."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("endpoint") / "model")


def test_a_language_model_names(prism, endpoint_model):
    with ChatServer() as server:
        endpoint = ("--endpoint", server.url, "--endpoint-model", "m\x1b[31m")
        result = prism("label", endpoint_model, *endpoint, "--prototypes", "5", "--overwrite")
    words = " ".join(result.stdout.split())
    for part in ("named 5", "requests 5", "tokens in 500", "tokens out 50"):
        assert part in words
    assert "\x1b[31m" not in result.stdout + result.stderr


def test_names_in_another_language_are_reported(prism, endpoint_model):
    foreign = {"name": "医学术语", "description": "关于疾病与治疗的词语", "role": "名词"}

    def answer(request, number):
        return {key: foreign.get(key, value) for key, value in good(request).items()}

    with ChatServer(answer) as server:
        endpoint = ("--endpoint", server.url, "--endpoint-model", "foreign")
        result = prism("label", endpoint_model, *endpoint, "--prototypes", "30", "--overwrite")
    words = " ".join(result.stdout.split())
    assert "named 30" in words
    assert "another language than the corpus" in words


def test_a_server_that_is_down_changes_nothing(refused, endpoint_model):
    def files():
        paths = (endpoint_model / "lens").rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    before = files()
    message = refused(
        "label", endpoint_model, "--endpoint", url, "--endpoint-model", "m", "--overwrite"
    )
    assert f"error: {url}: it cannot be reached" in message
    assert files() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint", "http://host/v1"], "go together"),
        (["--endpoint-model", "m"], "go together"),
        (["--prototypes", "3"], "goes with --endpoint"),
        (["--endpoint", "host:80", "--endpoint-model", "m"], "expected a URL such as"),
        (["--concurrency", "0"], "'--concurrency'"),
    ],
)
def test_options_that_do_not_fit_are_refused(refused, options, message):
    assert message in refused("label", "no such model", *options)
