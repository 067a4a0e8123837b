"""prismlm attach as a command: it estimates, attaches, and says what is wrong."""

import json

import pytest

import prismlm

SMALL = ("--prototypes", 32, "--prototypes-per-token", 4, "--epochs", 0.5, "--window", 64)


def test_an_estimate_writes_nothing(prism, tiny_model, tiny_corpus, tmp_path):
    arguments = ["--corpus", tiny_corpus, "--out", tmp_path / "out", *SMALL, "--dry-run", "--json"]
    result = prism("attach", tiny_model, *arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    corpus = prismlm.load(tiny_model).lens.meta.tokens
    assert found["tokens"] == found["states"] == corpus
    parts = [found[f"{name}_seconds"] for name in ("read", "fit", "lens")]
    assert found["seconds"] == pytest.approx(sum(parts))
    assert min(parts) > 0
    assert not (tmp_path / "out").exists()


def test_files_are_attached_and_explained(prism, tiny_model, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("The little man lived in a house by the sea. " * 60)
    more = tmp_path / "more"
    more.mkdir()
    for number in range(60):
        (more / f"{number}.txt").write_text(f"Letter {number}: the sea was calm today. " * 6)
    out = tmp_path / "out"
    given = ["--corpus", texts, "--corpus", more, "--out", out, *SMALL, "--weights", "fitted"]
    result = prism("attach", tiny_model, *given)
    assert result.returncode == 0, result.stderr
    for said in ("Reading hidden states", "Fitting prototypes", "Indexing"):
        assert said in result.stderr
    assert "CE of the prototypes alone" in result.stdout
    assert result.stdout.rstrip().endswith(str(out))
    assert json.loads((out / "prismlm.json").read_text())["weights"] == "fitted"
    explained = prism("explain", out, "The little man lived in a house")
    assert explained.returncode == 0, explained.stderr
    assert "Documents behind it" in explained.stdout


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("no/such-model", (), "could not be fetched"),
        (None, ("--window", "0"), "'--window'"),
        (None, ("--states-gb", "0"), "--states-gb is 0"),
        (None, ("--prototypes", "10", "--prototypes-per-token", "11"), "more than the 10 proto"),
        (None, ("--positions", "2"), "--positions is 2"),
        (None, ("--epochs", "-1"), "epochs is -1"),
        (None, ("--weights", "equal"), "is not one of 'cosine', 'fitted'"),
    ],
)
def test_what_cannot_be_attached(prism, tiny_model, tiny_corpus, tmp_path, model, options, said):
    given = ["attach", model or tiny_model, "--corpus", tiny_corpus, "--out", tmp_path / "out"]
    result = prism(*given, *options)
    assert result.returncode == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()
