"""prismlm inspect heads and spectra."""

import csv
import json
import math

import pytest
from rich.cells import cell_len

from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.probes.heads import SpectraOptions, head_report, spectra_report
from tests.helpers.head_models import make_gpt2, make_signal_noise

HEADS, SPECTRA = ("inspect", "heads"), ("inspect", "spectra")
ALL = ("--split", "all", "--tokens", 1500)
ROW = 48


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("spectra")


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


def save(model, corpus, directory, *, trained=True):
    model.save_pretrained(directory)
    corpus.tokenizer.save_pretrained(directory)
    if trained:
        noted = {"name": corpus.name, "fingerprint": corpus.fingerprint}
        recipe = {"corpus": str(corpus.path), "data": {"length": ROW}}
        (directory / "training.json").write_text(json.dumps({"recipe": recipe, "corpus": noted}))
    return directory


@pytest.fixture(scope="module")
def directory(corpus, place):
    return save(make_signal_noise(len(corpus.tokenizer)), corpus, place / "prism")


@pytest.fixture(scope="module")
def gpt2(corpus, place):
    return save(make_gpt2(len(corpus.tokenizer)), corpus, place / "gpt2", trained=False)


@pytest.fixture
def shown(prism):
    """Run a command, and return what it prints, which fits the terminal, as words."""

    def run(*arguments):
        text = prism(*arguments).stdout
        assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= 100
        assert not {"\x1b", "…"} & set(text)
        return " ".join(text.split())

    return run


def test_heads_in_json_are_the_report(document, corpus, directory):
    value = document(*HEADS, directory, *ALL)
    model = make_signal_noise(len(corpus.tokenizer))
    report = head_report(model, Sequences(corpus, "all", ROW, 1500), name="prism").to_dict()
    assert value == {"models": [json.loads(json.dumps(report))], "across": None}
    assert len(value["models"][0]["comparison"]["rows"]) == 7


def test_heads_as_tables(shown, directory, tmp_path):
    out = tmp_path / "heads.csv"
    text = shown(*HEADS, directory, *ALL, "--out", out)
    for part in ("uniform", "length 48", "effect", "signal heads 4 · noise heads 4 · layers 2"):
        assert part in text, part
    assert text.count(" signal ") >= 8
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows[:6]] == ["uniform", *["signal"] * 4, "noise"]
    assert len(rows) == 1 + 2 * 8
    shares = [key for key in rows[0] if key.startswith("share_")]
    assert all(sum(float(row[key]) for key in shares) == pytest.approx(1) for row in rows)


def test_heads_of_one_kind_have_no_comparison(shown, document, gpt2, corpus):
    command = (*HEADS, gpt2, *ALL, "--corpus", corpus.path, "--length", 32)
    text = shown(*command)
    assert "heads are of one kind" in text
    assert text.count("attention ") >= 8
    (model,) = document(*command, "--layer", 1)["models"]
    assert {head["layer"] for head in model["heads"]["rows"]} == {None, 1}
    assert model["comparison"] is None


def test_several_models_are_compared(shown, document, directory, place, corpus):
    other_seed = make_signal_noise(len(corpus.tokenizer), initializer_range=0.5)
    command = (*HEADS, directory, save(other_seed, corpus, place / "second"), *ALL)
    text = shown(*command)
    assert "in 2 models" in text
    assert "least p 0.5" in text
    value = document(*command)
    effects = [model["comparison"]["rows"][0]["effect"] for model in value["models"]]
    assert value["across"]["rows"][0]["effects"] == effects


def test_spectra_in_json_are_the_report(document, corpus, directory):
    value = document(*SPECTRA, directory, *ALL, "--positions", 200, "--documents", 3)
    options = SpectraOptions(positions=200, documents=3, trained_length=ROW)
    model, sequences = make_signal_noise(len(corpus.tokenizer)), Sequences(corpus, "all", ROW, 1500)
    report = spectra_report(model, sequences, name="prism", options=options)
    assert value == json.loads(json.dumps(report.to_dict()))
    assert (value["loss"]["length"], value["loss"]["trained_length"]) == (2 * ROW, ROW)
    assert len(value["cross_terms"]["rows"]) == 13
    assert all(math.isfinite(rates["gain"]) for rates in value["rates"]["rows"])


def test_the_loss_of_any_decoder(shown, gpt2, corpus):
    options = ("--corpus", corpus.path, "--loss-only", "--documents", 2, "--split", "all")
    text = shown(*SPECTRA, gpt2, *options, "--context", 64)
    assert "32–47" in text
    assert "Coding rates" not in text
    assert "trained length none" in text


def test_bad_input_is_refused(refused, directory, gpt2, corpus):
    there = ("--corpus", corpus.path, "--split", "all")
    for arguments, words in (
        ((*HEADS, directory, "--layer", 2, *ALL), ["no layer 2", "0 to 1"]),
        ((*HEADS, directory, "--split", "test"), ["'--split'", "'test'"]),
        ((*HEADS, directory, "--tokens", -1), ["--tokens"]),
        ((*HEADS, directory, "--length", 1, *ALL), ["window of 1 tokens", "sees 16 tokens"]),
        ((*HEADS, gpt2), ["does not say which corpus", "--corpus"]),
        ((*HEADS, gpt2, *there), ["window of 256 tokens", "64 positions"]),
        ((*SPECTRA, gpt2, *there, "--length", 32), ["'gpt2' has no signal and noise"]),
        (
            (*SPECTRA, gpt2, *there, "--length", 32, "--loss-only", "--context", 65),
            ["64 positions"],
        ),
        ((*SPECTRA, directory, "--seed", -1), ["--seed"]),
        ((*SPECTRA, directory, "--context", 0), ["context is 0", "from 2 on"]),
        ((*SPECTRA, gpt2, *there, "--loss-only", "--context", 1), ["context is 1"]),
        ((*SPECTRA, directory, "--documents", 0), ["documents is 0", "from 1 on"]),
    ):
        message = refused(*arguments)
        assert all(word in message for word in words), message
