"""prismlm inspect channels and interventions."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from rich.cells import cell_len

from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.probes.channels.report import channel_report
from tests.helpers.mixer_models import (
    CHANNELS,
    LAYERS,
    make_corpus,
    make_llama,
    make_model,
    save_model,
)

TEXT = "Old maps — 日本, the river."
COMMAND = ("inspect", "channels")
ALL = ("--split", "all")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("channels")


@pytest.fixture(scope="module")
def corpus(place):
    return make_corpus(place)


@pytest.fixture(scope="module")
def directory(corpus, place):
    return save_model(make_model(len(corpus.tokenizer)), corpus, place / "protot")


@pytest.fixture(scope="module")
def llama(corpus, place):
    return save_model(make_llama(len(corpus.tokenizer)), corpus, place / "llama", trained_on=False)


def test_json_is_the_report_of_the_training_corpus(document, corpus, directory):
    sequences = Sequences(Corpus.open(corpus.path), "all", max_tokens=100_000)
    model = make_model(len(corpus.tokenizer))
    report = channel_report(model, corpus.tokenizer, sequences, name="protot").to_dict()
    value = document(*COMMAND, directory, *ALL)
    assert value == json.loads(json.dumps(report)) | {"beside": None}


def test_one_channel(prism, document, directory):
    arguments = (*COMMAND, directory, *ALL, "--layer", 1, "--channel", 4)
    (layer,) = document(*arguments)["layers"]
    assert layer["layer"] == 1
    assert [channel["channel"] for channel in layer["channels"]] == [4]
    corpus = ("--corpus", directory.parent / "corpus")
    shown = prism(*arguments, "--text", TEXT, *corpus, columns=80).stdout
    assert max(cell_len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "Layer 0" not in shown
    assert "holds most of" in shown


def test_a_text_alone_needs_no_corpus(prism, directory, tmp_path):
    page = tmp_path / "page.html"
    result = prism(*COMMAND, directory, "--text", TEXT, "--html", page)
    assert result.stderr == f"wrote {page}\n"
    assert result.stdout.count("channel  life") == LAYERS
    assert "sparsity" not in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_llama_has_heads_and_can_be_compared(prism, document, directory, llama):
    shown = prism(*COMMAND, llama, *ALL, "--corpus", directory.parent / "corpus").stdout
    assert "no channels" in shown
    assert " values " in shown
    beside = document(*COMMAND, directory, *ALL, "--layer", 0, "--beside", llama)["beside"]
    assert beside["of"] == "heads"
    assert [list(layer["metrics"]) for layer in beside["layers"]] == [["values"]] * 2


def test_plots_are_written(prism, directory, llama, tmp_path):
    out = tmp_path / "plots"
    result = prism(*COMMAND, directory, *ALL, "--beside", llama, "--out", out)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files.keys() == {"metrics.svg", "half-life.svg", "locality.svg", "lags.svg"}
    assert all(data.startswith(b"<?xml") for data in files.values())
    assert result.stderr.count("wrote ") == 4


def test_bad_input_is_refused(refused, directory, llama, tmp_path):
    corpus = directory.parent / "corpus"
    for arguments, words in (
        ((directory, "--channel", 1), ["--layer"]),
        ((directory, "--layer", LAYERS), ["no layer 3", "0 to 2"]),
        ((directory, "--layer", 1, "--channel", CHANNELS), ["no channel 6 in layer 1"]),
        ((directory, "--split", "test"), ["'--split'", "'test'"]),
        ((directory, "--max-tokens", -1), ["--max-tokens"]),
        ((directory, "--corpus", tmp_path / "none"), ["none is not a directory"]),
        ((directory, "--text", ""), ["the text is empty"]),
        ((tmp_path,), ["cannot be read"]),
        ((llama,), ["does not say which corpus", "--corpus"]),
        ((llama, "--corpus", corpus, "--html", tmp_path / "x.html"), ["no prototype mixer"]),
    ):
        message = refused(*COMMAND, *arguments)
        assert all(word in message for word in words), message


def test_a_model_with_decays_by_token_is_read(prism, corpus, place):
    model = make_model(len(corpus.tokenizer), decay_mode="token")
    saved, page = save_model(model, corpus, place / "by-token"), place / "by-token.html"
    prism(*COMMAND, saved, *ALL, "--corpus", corpus.path, "--text", TEXT, "--html", page)
    assert page.is_file()
    prism(*COMMAND, saved, "--text", TEXT, "--layer", 1, "--channel", 2)


@pytest.fixture(scope="module")
def cases(corpus, place):
    """Two models and a file of cases, as arguments of a command."""
    for seed in (0, 1):
        model = make_model(len(corpus.tokenizer))
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mixer.prototypes.copy_(torch.randn_like(block.mixer.prototypes))
        save_model(model, corpus, place / f"seed{seed}", trained_on=False)
    rows = [
        {"concept": "boxes", "context": f"{subject} collects letters in a", "target": "box"}
        for subject in ("Old maps", "A teacher", "The river", "My neighbour")
    ]
    path = place / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--cases", path)


def test_a_channel_is_found_in_each_model(document, corpus, place, cases, tmp_path):
    out, models = tmp_path / "out", [place / "seed0", place / "seed1"]
    options = ("--minimum", "1e-6", "--controls", "2", "--out", out)
    find = ("--find", "--corpus", corpus.path)
    value = document("inspect", "interventions", *models, *cases, *find, *options)
    assert [item["model"] for item in value["models"]] == [str(path) for path in models]
    assert json.loads((out / "interventions.json").read_text()) == value
    for number, item in enumerate(value["models"]):
        ranking, table = item["found"], item["table"]
        best = ranking["rows"][0]
        assert best["difference"] == max(d for layer in ranking["difference"] for d in layer)
        assert item["emerges"] == (ranking["p"] < 0.05)
        assert table["channels"] == [[best["layer"], best["channel"]]]
        assert table["cases"] == 4
        rows = pq.read_table(out / f"{number}-seed{number}.parquet").to_pylist()
        assert len(rows) == 4 * 3 * 5
        page = (out / f"{number}-seed{number}.md").read_text()
        assert f"**L{best['layer']} P{best['channel']}: change in %**" in page
    assert value["models"][0]["heldout_count"] > 0


def test_interventions_on_named_channels(prism, place, cases):
    command = ("inspect", "interventions", place / "seed0", *cases, "--minimum", "1e-6")
    shown = prism(*command, "--channel", "1:2", "--channel", "2:0").stdout
    for text in ("L1 P2: change in %", "L2 P0: change in %", "collects letters in a", "left out 0"):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 100
    shown = prism(*command, "--channel", "1:2", "--by", "points", "--controls", "1").stdout
    assert "percentage points" in shown
    assert "Relative change of the probability, %" in shown
    assert "controls 1 ·" in shown


def test_bad_interventions_are_refused(refused, place, cases):
    for arguments, words in (
        (cases, "expected either channels"),
        ((*cases, "--find", "--channel", "0:0"), "expected either channels"),
        ((*cases, "--find"), "go together"),
        ((*cases, "--channel", "0:0", "--corpus", place / "corpus"), "go together"),
        (("--cases", "woman", "--channel", "0:0"), "Did you mean 'women'"),
        ((*cases, "--channel", "1:9"), "no channel 9 in layer 1"),
        ((*cases, "--channel", "1"), "expected LAYER:CHANNEL"),
        ((*cases, "--channel", "0:0", "--by", "point"), "'points'"),
        ((*cases, "--channel", "0:0", "--minimum", "0.99"), "none of 4 cases"),
        (("--cases", "mental_health", "--channel", "0:0"), "--first-token"),
    ):
        assert words in refused("inspect", "interventions", place / "seed0", *arguments)
    missing = ("inspect", "interventions", place / "nothing", *cases, "--channel", "0:0")
    assert "is not a directory" in refused(*missing)
