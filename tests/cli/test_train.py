"""prismlm attach."""

import json

import pytest

import prismlm

SMALL = ("--prototypes", 32, "--prototypes-per-token", 4, "--epochs", 0.5, "--window", 64)


def test_an_estimate_writes_nothing(document, tiny_model, tiny_corpus, tmp_path):
    out = tmp_path / "out"
    arguments = ("--corpus", tiny_corpus, "--out", out, *SMALL, "--dry-run")
    estimate = document("attach", tiny_model, *arguments)
    assert estimate["tokens"] == estimate["states"] == prismlm.load(tiny_model).lens.meta.tokens
    assert estimate["seconds"] > 0
    assert not out.exists()


def test_files_are_attached_and_explained(prism, tiny_model, tmp_path):
    texts, more, out = (tmp_path / name for name in ("texts.txt", "more", "out"))
    texts.write_text("The little man lived in a house by the sea. " * 60)
    more.mkdir()
    for number in range(60):
        (more / f"{number}.txt").write_text(f"Letter {number}: the sea was calm today. " * 6)
    files = ("--corpus", texts, "--corpus", more, "--out", out)
    result = prism("attach", tiny_model, *files, *SMALL, "--weights", "cosine")
    for task in ("Reading hidden states", "Fitting prototypes", "Indexing"):
        assert task in result.stderr
    assert "prototype only cross-entropy" in result.stdout
    assert result.stdout.rstrip().endswith(str(out))
    assert json.loads((out / "prismlm.json").read_text())["weights"] == "cosine"
    assert "Documents behind it" in prism("explain", out, "The little man lived in a house").stdout


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("no/such-model", (), "nor a model that can be downloaded"),
        (
            None,
            ("--prototypes", "10", "--prototypes-per-token", "11"),
            "at most the number of proto",
        ),
        (None, ("--positions", "2"), "--positions is 2"),
    ],
)
def test_attach_refuses(refused, tiny_model, tiny_corpus, tmp_path, model, options, words):
    files = ("--corpus", tiny_corpus, "--out", tmp_path / "out")
    assert words in refused("attach", model or tiny_model, *files, *options)
    assert not (tmp_path / "out").exists()
