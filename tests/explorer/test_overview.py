"""Prompts and texts to begin with, against the documents that the corpus holds out."""

import shutil
from types import SimpleNamespace

import pytest

import prismlm
from prismlm.corpus import Corpus, build_corpus
from prismlm.explorer.overview import held_out_texts, lens_options
from prismlm.files import json_text


def of_corpus(corpus):
    """A lens of which nothing but its corpus is asked."""
    return SimpleNamespace(corpus=corpus)


def test_texts_begin_held_out_documents_of_each_domain(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    texts = held_out_texts(of_corpus(corpus))
    domains, held = corpus.column("domain"), corpus.split("heldout").tolist()
    assert list(texts) == sorted({domains[number] for number in held})
    for domain, text in texts.items():
        own = [corpus.text(number).strip() for number in held if domains[number] == domain]
        (whole,) = [one for one in own if one.startswith(text)]
        assert len(text) <= 800
        assert text == whole or (len(text) >= 600 and whole[len(text)].isspace())


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_corpus_of_at_most_one_domain_is_told_by_titles(tiny_model, tmp_path, fraction):
    rows = [
        {"id": f"d{n}", "title": f"The {n}\nth", "text": f"Begin with {n}. " * n}
        for n in range(1, 60)
    ]
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
    corpus = build_corpus(
        source, tmp_path / "corpus", tokenizer=tiny_model, heldout_fraction=fraction
    )
    texts = held_out_texts(of_corpus(corpus))
    numbers = [int(name.split()[-2]) for name in texts]
    assert len(texts) == (12 if fraction else 0)
    assert all(corpus.doc_ids.index(f"d{n}") in corpus.split("heldout") for n in numbers)


def test_a_document_without_title_has_its_first_words_as_name(tiny_model, tmp_path):
    text = "Coffee is brewed with hot water."
    (tmp_path / "coffee.txt").write_text(text)
    corpus = build_corpus(
        tmp_path / "coffee.txt", tmp_path / "corpus", tokenizer=tiny_model, heldout_fraction=0.999
    )
    assert held_out_texts(of_corpus(corpus)) == {text: text}


def test_commands_choose_a_lens_that_is_not_the_default(tiny_model, tmp_path):
    path, away = shutil.copytree(tiny_model, tmp_path / "copy"), tmp_path / "away"
    assert lens_options(prismlm.load(path)) == []
    for other in (away, path / "lens" / "other"):
        shutil.copytree(path / "lens" / "sample", other)
    assert lens_options(prismlm.load(path, lens=away)) == ["--lens", str(away)]
    assert lens_options(prismlm.load(path, lens="other")) == ["--lens", "other"]
