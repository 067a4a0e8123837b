"""The command shows what the report says."""

import json

import pytest
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
FEW = ("--split", "all")


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


def test_json_is_the_report_of_the_training_corpus(prism, corpus, directory):
    result = prism(*COMMAND, directory, *FEW, "--json")
    assert result.returncode == 0, result.stderr
    assert "Reading activations: " in result.stderr
    report = channel_report(
        make_model(len(corpus.tokenizer)),
        corpus.tokenizer,
        Sequences(Corpus.open(corpus.path), "all", max_tokens=100_000),
        name="protot",
    )
    printed = json.loads(result.stdout)
    assert printed.pop("beside") is None
    assert printed == json.loads(json.dumps(report.to_dict()))


def test_one_channel_alone(prism, directory):
    arguments = (*COMMAND, directory, *FEW, "--layer", 1, "--channel", 4)
    value = json.loads(prism(*arguments, "--json").stdout)
    assert [layer["layer"] for layer in value["layers"]] == [1]
    assert [channel["channel"] for channel in value["layers"][0]["channels"]] == [4]
    shown = prism(*arguments, "--text", TEXT, "--corpus", directory.parent / "corpus", columns=80)
    assert shown.returncode == 0, shown.stderr
    assert max(cell_len(line.rstrip()) for line in shown.stdout.splitlines()) <= 80
    assert "Layer 0" not in shown.stdout


def test_a_text_alone_reads_no_corpus(prism, directory, tmp_path):
    page = tmp_path / "page.html"
    result = prism(*COMMAND, directory, "--text", TEXT, "--html", page)
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"wrote {page}\n"
    assert result.stdout.count("channel  life") == LAYERS
    assert "sparsity" not in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_llama_has_heads_and_can_stand_beside(prism, directory, llama):
    corpus = directory.parent / "corpus"
    alone = prism(*COMMAND, llama, *FEW, "--corpus", corpus)
    assert alone.returncode == 0, alone.stderr
    assert "no channels" in alone.stdout
    assert " values " in alone.stdout
    both = prism(*COMMAND, directory, *FEW, "--layer", 0, "--beside", llama, "--json")
    beside = json.loads(both.stdout)["beside"]
    assert beside["of"] == "heads"
    assert [list(layer["metrics"]) for layer in beside["layers"]] == [["values"]] * 2


def test_plots_are_written(prism, directory, llama, tmp_path):
    out = tmp_path / "plots"
    result = prism(*COMMAND, directory, *FEW, "--beside", llama, "--out", out)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"metrics.svg", "half-life.svg", "locality.svg", "lags.svg"}
    assert all((out / name).read_bytes().startswith(b"<?xml") for name in names)
    assert result.stderr.count("wrote ") == 4


def test_what_cannot_be_read_is_refused(refused, directory, llama, tmp_path):
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


def test_a_model_of_decays_by_token_is_read(prism, corpus, place):
    by_token = make_model(len(corpus.tokenizer), decay_mode="token")
    saved = save_model(by_token, corpus, place / "by-token")
    page = place / "by-token.html"
    arguments = (saved, *FEW, "--corpus", corpus.path, "--text", TEXT)
    result = prism(*COMMAND, *arguments, "--html", page, columns=120)
    assert result.returncode == 0, result.stderr
    assert page.is_file()
    result = prism(*COMMAND, saved, "--text", TEXT, "--layer", 1, "--channel", 2, columns=120)
    assert result.returncode == 0, result.stderr
