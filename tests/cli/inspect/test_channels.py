"""The command shows what the report says."""

import json
import sys

import pytest
from rich.cells import cell_len

from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.instruments.channels.build_report import ReportOptions, channel_report
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
FEW = ("--split", "all", "--top", 3)


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
    assert "Reading channels: " in result.stderr
    report = channel_report(
        make_model(len(corpus.tokenizer)),
        corpus.tokenizer,
        Sequences(Corpus.open(corpus.path), "all", max_tokens=100_000),
        name="protot",
        options=ReportOptions(kept=3),
    )
    printed = json.loads(result.stdout)
    assert printed.pop("beside") is None
    assert printed == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("columns", [80, 120])
def test_human_output_fits_and_has_all_parts(prism, directory, columns):
    corpus = directory.parent / "corpus"
    arguments = (*COMMAND, directory, *FEW, "--corpus", corpus, "--text", TEXT)
    result = prism(*arguments, columns=columns)
    assert result.returncode == 0, result.stderr
    assert max(cell_len(line.rstrip()) for line in result.stdout.splitlines()) <= columns
    assert "\x1b" not in result.stdout
    for part in (
        f"3 layers of {CHANNELS} channels", "L1 sparsity", "Spearman ρ = ", "Cohen's d",
        "read before it is written", "shuffled", "Layer 2", "first sequence", "日",
        "reads by its write gate",
    ):  # fmt: skip
        assert part in result.stdout, part
    assert "�" not in result.stdout


def test_one_channel_in_full(prism, directory):
    result = prism(*COMMAND, directory, *FEW, "--layer", 1, "--channel", 4, "--text", TEXT,
                   "--corpus", directory.parent / "corpus")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Layer 1, channel 4" in result.stdout
    assert result.stdout.count(" in all") == 3
    assert "holds most of" in result.stdout
    assert "still held" in result.stdout
    assert "mass" not in result.stdout
    assert "Layer 0" not in result.stdout
    arguments = (*COMMAND, directory, *FEW, "--layer", 1, "--channel", 4, "--json")
    value = json.loads(prism(*arguments).stdout)
    assert [layer["layer"] for layer in value["layers"]] == [1]
    assert [channel["channel"] for channel in value["layers"][0]["channels"]] == [4]


def test_a_text_alone_reads_no_corpus(prism, directory, tmp_path):
    page = tmp_path / "page.html"
    result = prism(*COMMAND, directory, "--text", TEXT, "--html", page)
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"wrote {page}\n"
    assert "half-lives" in result.stdout
    assert "L1 sparsity" not in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_llama_has_heads_and_can_stand_beside(prism, directory, llama):
    corpus = directory.parent / "corpus"
    alone = prism(*COMMAND, llama, *FEW, "--corpus", corpus)
    assert alone.returncode == 0, alone.stderr
    assert "there are no channels" in alone.stdout
    assert "‖value‖" in alone.stdout
    both = prism(*COMMAND, directory, *FEW, "--layer", 0, "--beside", llama, "--json")
    beside = json.loads(both.stdout)["beside"]
    assert beside["of"] == "heads"
    assert [list(layer["metrics"]) for layer in beside["layers"]] == [["values"]] * 2


def test_plots_are_written(prism, directory, llama, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plots"
    result = prism(*COMMAND, directory, *FEW, "--beside", llama, "--out", out, "--format", "png")
    assert result.returncode == 0, result.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"metrics.png", "half-life.png", "locality.png", "lags.png"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert result.stderr.count("wrote ") == 4


def test_what_cannot_be_read_is_refused(refused, directory, llama, tmp_path):
    corpus = directory.parent / "corpus"
    for arguments, words in (
        ((directory, "--channel", 1), ["--layer"]),
        ((directory, "--layer", LAYERS), ["no layer 3", "0 to 2"]),
        ((directory, "--layer", 1, "--channel", CHANNELS), ["no channel 6 in layer 1"]),
        ((directory, "--split", "test"), ["--split is 'test'"]),
        ((directory, "--max-tokens", -1), ["--max-tokens"]),
        ((directory, "--format", "pgn"), ["'pgn'", "Did you mean 'png'"]),
        ((directory, "--corpus", tmp_path / "none"), ["none is not a directory"]),
        ((directory, "--text", ""), ["the text is empty"]),
        ((tmp_path,), ["cannot be read"]),
        ((llama,), ["does not say which corpus", "--corpus"]),
        ((llama, "--corpus", corpus, "--html", tmp_path / "x.html"), ["no prototype mixer"]),
    ):
        message = refused(*COMMAND, *arguments)
        assert all(word in message for word in words), message


def test_without_matplotlib_the_extra_is_named(directory, tmp_path):
    from typer.testing import CliRunner

    from prismlm.cli.app import app

    with pytest.MonkeyPatch.context() as patch:
        gone = ("matplotlib.", "prismlm.pages.channel_plots")
        for name in [name for name in sys.modules if name.startswith(gone)]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "matplotlib", None)
        arguments = map(str, (*COMMAND, directory, "--out", tmp_path))
        result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert "pip install 'prismlm[plot]'" in result.stderr


def test_a_model_of_decays_by_token_is_read(prism, corpus, place):
    by_token = make_model(len(corpus.tokenizer), decay_mode="token")
    saved = save_model(by_token, corpus, place / "by-token")
    page = place / "by-token.html"
    arguments = (saved, *FEW, "--corpus", corpus.path, "--text", TEXT)
    result = prism(*COMMAND, *arguments, "--html", page, columns=120)
    assert result.returncode == 0, result.stderr
    assert "decays depend on the token, so no channel has a half-life" in result.stdout
    assert "Is a channel read before it is written?" in result.stdout
    first = next(line for line in result.stdout.splitlines() if line.split()[:1] == ["0"]
                 and "–" in line)  # fmt: skip
    assert first.split()[1] == "–"
    assert page.is_file()
    result = prism(*COMMAND, saved, "--text", TEXT, "--layer", 1, "--channel", 2, columns=120)
    assert result.returncode == 0, result.stderr
    assert "no half-life of its own: β depends on the token (over the text " in result.stdout
    assert "holds most of" in result.stdout
