"""Prompts and texts to begin with, against the documents that the corpus holds out."""

import shutil
from types import SimpleNamespace

import pytest

import prismlm
from prismlm.corpus import Corpus, build_corpus
from prismlm.explorer.overview import held_out_texts, lens_options
from prismlm.files import json_text

COFFEE = "Coffee is brewed with hot water."


def texts_of(corpus):
    """The texts of a lens, of which nothing but its corpus is asked."""
    return held_out_texts(SimpleNamespace(corpus=corpus))


def test_texts_begin_held_out_documents_of_each_domain(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    texts = texts_of(corpus)
    domains, held = corpus.column("domain"), corpus.split("heldout").tolist()
    assert list(texts) == sorted({domains[number] for number in held})
    for domain, text in texts.items():
        own = [corpus.text(number).strip() for number in held if domains[number] == domain]
        (whole,) = [one for one in own if one.startswith(text)]
        assert len(text) <= 800
        assert text == whole or (len(text) >= 600 and whole[len(text)].isspace())


TITLED = [{"title": f"The {n}\nth", "text": f"Begin with {n}. " * n} for n in range(1, 60)]


@pytest.mark.parametrize(
    ("rows", "fraction", "count"),
    [(TITLED, 0.0, 0), (TITLED, 0.5, 12), ([{"text": COFFEE}], 0.999, 1)],
)
def test_a_corpus_of_at_most_one_domain_is_named_by_titles_or_first_words(
    tiny_model, tmp_path, rows, fraction, count
):
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
    corpus = build_corpus(
        source, tmp_path / "corpus", tokenizer=tiny_model, heldout_fraction=fraction
    )
    texts = texts_of(corpus)
    held = [rows[number] for number in corpus.split("heldout").tolist()]
    names = {" ".join(row.get("title", COFFEE).split()): row["text"].strip() for row in held}
    assert len(texts) == count
    assert all(names[name].startswith(text) for name, text in texts.items())


def test_commands_choose_a_lens_that_is_not_the_default(tiny_model, tmp_path):
    path, away = shutil.copytree(tiny_model, tmp_path / "copy"), tmp_path / "away"
    assert lens_options(prismlm.load(path)) == []
    for other in (away, path / "lens" / "other"):
        shutil.copytree(path / "lens" / "sample", other)
    assert lens_options(prismlm.load(path, lens=away)) == ["--lens", str(away)]
    assert lens_options(prismlm.load(path, lens="other")) == ["--lens", "other"]
