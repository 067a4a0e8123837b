"""The commands show what the reports say."""

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


def fits(result, columns=100):
    assert result.returncode == 0, result.stderr
    assert max(cell_len(line.rstrip()) for line in result.stdout.splitlines()) <= columns
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout


def test_heads_in_json_are_the_report(prism, corpus, directory):
    result = prism(*HEADS, directory, *ALL, "--json")
    assert result.returncode == 0, result.stderr
    assert "Reading heads: " in result.stderr
    report = head_report(
        make_signal_noise(len(corpus.tokenizer)),
        Sequences(corpus, "all", ROW, 1500),
        name="prism",
    )
    printed = json.loads(result.stdout)
    assert printed == {"models": [json.loads(json.dumps(report.to_dict()))], "across": None}
    assert len(printed["models"][0]["comparison"]["rows"]) == 7


def test_heads_on_a_terminal_and_as_a_table(prism, directory, tmp_path):
    out = tmp_path / "heads.csv"
    result = prism(*HEADS, directory, *ALL, "--out", out)
    fits(result)
    for part in ("uniform", "length 48", "effect", "signal heads 4 · noise heads 4 · layers 2"):
        assert part in " ".join(result.stdout.split()), part
    assert result.stdout.count(" signal ") >= 8
    assert f"wrote {out}" in result.stderr
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows[:6]] == ["uniform", *["signal"] * 4, "noise"]
    assert len(rows) == 1 + 2 * 8
    shares = [key for key in rows[0] if key.startswith("share_")]
    assert all(sum(float(row[key]) for key in shares) == pytest.approx(1) for row in rows)


def test_heads_of_one_kind_have_no_comparison(prism, directory, gpt2, corpus):
    result = prism(*HEADS, gpt2, *ALL, "--corpus", corpus.path, "--length", 32)
    fits(result)
    assert "heads are of one kind" in " ".join(result.stdout.split())
    assert result.stdout.count("attention ") >= 8
    one = prism(*HEADS, gpt2, *ALL, "--corpus", corpus.path, "--length", 32, "--layer", 1, "--json")
    (found,) = json.loads(one.stdout)["models"]
    assert {head["layer"] for head in found["heads"]["rows"]} == {None, 1}
    assert found["comparison"] is None


def test_several_models_are_brought_together(prism, directory, place, corpus):
    torch_seed = make_signal_noise(len(corpus.tokenizer), initializer_range=0.5)
    second = save(torch_seed, corpus, place / "second")
    result = prism(*HEADS, directory, second, *ALL)
    fits(result)
    assert "in 2 models" in result.stdout
    assert "least p 0.5" in " ".join(result.stdout.split())
    value = json.loads(prism(*HEADS, directory, second, *ALL, "--json").stdout)
    effects = [model["comparison"]["rows"][0]["effect"] for model in value["models"]]
    assert value["across"]["rows"][0]["effects"] == effects


def test_spectra_in_json_are_the_report(prism, corpus, directory):
    asked = ("--positions", 200, "--documents", 3)
    result = prism(*SPECTRA, directory, *ALL, *asked, "--json")
    assert result.returncode == 0, result.stderr
    report = spectra_report(
        make_signal_noise(len(corpus.tokenizer)),
        Sequences(corpus, "all", ROW, 1500),
        name="prism",
        options=SpectraOptions(positions=200, documents=3, trained_length=ROW),
    )
    printed = json.loads(result.stdout)
    assert printed == json.loads(json.dumps(report.to_dict()))
    assert (printed["loss"]["length"], printed["loss"]["trained_length"]) == (2 * ROW, ROW)
    assert len(printed["cross_terms"]["rows"]) == 13
    assert all(math.isfinite(rates["gain"]) for rates in printed["rates"]["rows"])


def test_the_loss_of_any_decoder(prism, gpt2, corpus):
    asked = ("--corpus", corpus.path, "--loss-only", "--documents", 2, "--split", "all")
    result = prism(*SPECTRA, gpt2, *asked, "--context", 64)
    fits(result)
    assert "32–47" in result.stdout
    assert "Coding rates" not in result.stdout
    assert "trained length none" in " ".join(result.stdout.split())


def test_what_cannot_be_read_is_refused(refused, directory, gpt2, corpus, tmp_path):
    there = ("--corpus", corpus.path, "--split", "all")
    for arguments, words in (
        ((*HEADS, directory, "--layer", 2, *ALL), ["no layer 2", "0 to 1"]),
        ((*HEADS, directory, "--split", "test"), ["'--split'", "'test'"]),
        ((*HEADS, directory, "--tokens", -1), ["--tokens"]),
        ((*HEADS, directory, "--length", 1, *ALL), ["window of 1 tokens", "sees 16 tokens"]),
        ((*HEADS, directory, "--out", tmp_path / "x.png"), [".csv"]),
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
