"""prismlm inspect prototypes and themes."""

import json
import re
import shutil

import pytest

import prismlm
from tests.helpers.chat_server import ChatServer
from tests.helpers.mixer_models import make_corpus, make_llama, make_model, save_model

COMMAND = ("inspect", "themes")
ALL = ("--split", "all", "--units", 6)
GOOD = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1, "explanation": "Sea."}


def test_a_list_and_a_card(prism, document, refused, tiny_model):
    lens, command = prismlm.load(tiny_model).lens, ("inspect", "prototypes", tiny_model)
    everything = document(*command, "--limit", "500", "--all")
    assert everything["total"] == lens.num_prototypes
    few = int((lens.cell_sizes < 10).sum())
    listed = document(*command, "--limit", "500")
    assert listed["total"] == lens.num_prototypes - few
    assert listed["items"] == [row for row in everything["items"] if row["positions"] >= 10]
    assert ("fewer than 10 places are not listed: --all" in prism(*command).stdout) == (few > 0)
    sizes = [row["positions"] for row in everything["items"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == lens.meta.cells["rows"]
    first = everything["items"][0]["id"]
    card = document(*command, first)
    assert card["contexts"] == lens.index.to_pylist()[lens.rows_of(first)][:12]
    assert card["tokens"][0][0] == lens.prototypes["top_tokens"][first][0].as_py()
    shown = prism(*command, first).stdout
    assert card["name"] in shown
    assert f"[{card['contexts'][0]['token'].strip()}]" in shown
    assert "expected" in refused(*command, lens.num_prototypes)
    assert "leave out the ID" in refused(*command, first, "--search", "law")
    message = refused(*command, "--category", "Morphologie")
    assert "no prototype" in message
    assert "prismlm label" in message


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models with channels and with heads, by the option."""
    place = tmp_path_factory.mktemp("themes")
    corpus = make_corpus(place)
    models = {"channels": make_model(len(corpus.tokenizer))}
    models["heads"] = make_llama(len(corpus.tokenizer))
    return {name: save_model(model, corpus, place / name) for name, model in models.items()}


# A layer has six channels, and four heads.
@pytest.mark.parametrize(("of", "units"), [("channels", 6), ("heads", 4)])
def test_json_has_every_unit_and_sums(document, models, of, units):
    value = document(*COMMAND, models[of], "--of", of, *ALL, "--layer", 1)
    assert (value["of"], value["judge"], value["asked"]) == (of, "words", None)
    rows = value["units"]["rows"]
    assert len(rows) == len(value["random"]["rows"]) == units
    for summary in value["figures"]["rows"]:
        values = [unit[summary["figure"]] for unit in rows]
        assert summary["histogram"] == [values.count(i) for i in range(1, 11)]
        assert summary["mean"] == pytest.approx(sum(values) / units)
        assert sum(summary["random_histogram"]) == units
        difference = summary["difference"]
        assert difference["low"] <= difference["value"] <= difference["high"]


def test_prototypes_by_an_endpoint_with_some_invalid_answers(prism, document, tiny_model, tmp_path):
    # A copy, since answers are kept in it.
    model = shutil.copytree(tiny_model, tmp_path / "model")
    with ChatServer(lambda request, number: "hm" if number in (1, 2) else GOOD) as server:
        endpoint = ("--endpoint", server.url, "--endpoint-model", "m\x1b[31m")
        command = (*COMMAND, model, *endpoint, "--units", 40)
        result = prism(*command, "--json")
        value, requests = json.loads(result.stdout), len(server.requests)
        again = document(*command)
    rows = value["units"]["rows"]
    # The questions about random sequences count too.
    assert f"{2 * len(rows)} questions of " in result.stderr
    assert value["judge"] == "endpoint:m [31m"
    assert {unit["theme"] for unit in rows if "theme" in unit} == {"tides"}
    assert value["asked"]["requests"] == requests
    # Only questions without an answer are asked again.
    assert again["asked"]["requests"] <= 4
    assert value["figures"]["rows"][1]["mean"] == 10


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
def test_bad_input_is_refused(refused, models, options, message):
    assert re.search(message, refused(*COMMAND, models["heads"], *options))
