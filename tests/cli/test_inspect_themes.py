"""prismlm inspect themes on tiny models: figures beside random sequences, and what is refused."""

import json
import re
import shutil

import pytest

from tests.helpers.chat_server import ChatServer
from tests.helpers.mixer_models import make_corpus, make_llama, make_model, save_model

COMMAND = ("inspect", "themes")
ALL = ("--split", "all", "--units", 6)
GOOD = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1, "explanation": "Sea."}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("themes")


@pytest.fixture(scope="module")
def corpus(place):
    return make_corpus(place)


@pytest.fixture(scope="module")
def protot(corpus, place):
    return save_model(make_model(len(corpus.tokenizer)), corpus, place / "protot")


@pytest.fixture(scope="module")
def llama(corpus, place):
    return save_model(make_llama(len(corpus.tokenizer)), corpus, place / "llama")


@pytest.fixture
def own_model(tiny_model, tmp_path):
    """A copy: answers are kept in it."""
    return shutil.copytree(tiny_model, tmp_path / "model")


# Of the six that are asked for, as many as a layer has.
@pytest.mark.parametrize(
    ("of", "kind", "units"), [("channels", "protot", 6), ("heads", "llama", 4)]
)
def test_json_holds_every_unit_and_sums(prism, request, of, kind, units):
    model = request.getfixturevalue(kind)
    result = prism(*COMMAND, model, "--of", of, *ALL, "--layer", 1, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["of"], found["judge"], found["asked"]) == (of, "words", None)
    assert len(found["units"]["rows"]) == len(found["random"]["rows"]) == units
    for summary in found["figures"]["rows"]:
        values = [unit[summary["figure"]] for unit in found["units"]["rows"]]
        assert summary["histogram"] == [values.count(i) for i in range(1, 11)]
        assert summary["mean"] == pytest.approx(sum(values) / units)
        assert sum(summary["random_histogram"]) == units
        apart = summary["difference"]
        assert apart["low"] <= apart["value"] <= apart["high"]


def test_prototypes_by_an_endpoint_that_answers_some_rubbish(prism, own_model):
    def behave(request, number):
        return "hm" if number in (1, 2) else GOOD

    with ChatServer(behave) as server:
        options = ("--endpoint", server.url, "--endpoint-model", "m\x1b[31m", "--units", 40)
        result = prism(*COMMAND, own_model, *options, "--json")
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        asked = len(server.requests)
        # Random sequences are asked about too.
        assert f"{2 * len(found['units']['rows'])} questions of " in result.stderr
        again = json.loads(prism(*COMMAND, own_model, *options, "--json").stdout)
    assert found["judge"] == "endpoint:m [31m"
    judged = [unit for unit in found["units"]["rows"] if "theme" in unit]
    assert all(unit["theme"] == "tides" for unit in judged)
    assert found["asked"]["requests"] == asked
    # Only what got no answer is asked again.
    assert again["asked"]["requests"] <= 4
    assert found["figures"]["rows"][1]["mean"] == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--of", "neurons"), "neurons"),
        (("--of", "heads", "--lens", "sample"), "--lens is for prototypes"),
        (("--layer", 1), "--corpus and --layer are for channels and heads"),
        (("--endpoint", "http://localhost:1/v1"), "go together"),
        (("--of", "channels"), "no prototype mixer"),
        (("--of", "heads"), "has 10 sequences: read more text"),
        (("--of", "heads", "--layer", 9, "--split", "all"), "there is no layer 9"),
    ],
)
def test_what_cannot_be_done_is_said(refused, llama, options, message):
    assert re.search(message, refused(*COMMAND, llama, *options))
