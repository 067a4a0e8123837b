"""Text of a lens: sentences, its own tokens against the corpus, and whether it is enough."""

import shutil
from collections import Counter

import numpy as np
import pytest

import prismlm
from prismlm.corpus import build_corpus
from prismlm.errors import InputError, StaleLensError
from prismlm.lens import store
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.lens import OwnText, inspect_lens, joined, sentence_around, verdict
from prismlm.lens.suffixes import Suffixes
from tests.helpers.lens_files import change_meta

ODD = "Ein 東京 👩\u200d🚀 café\t\n\n«x»  two  blanks \u202e end. Then <|endoftext|> more."


@pytest.fixture(scope="module")
def odd(tiny_model, tmp_path_factory):
    """A copy of the tiny model whose corpus has text that is hard to decode."""
    base = tmp_path_factory.mktemp("odd")
    (base / "texts.txt").write_text(ODD)
    (base / "more.txt").write_text("The patient was given a dose.")
    corpus = build_corpus(base, base / "corpus", tokenizer=tiny_model)
    model = shutil.copytree(tiny_model, base / "model", ignore=lambda *_: ["lens"])
    lm = prismlm.load(model)
    options = IndexOptions(contexts=2, window=16, stride=8, split="all")
    build_index(lm.model, lm.head, corpus, model / "lens" / "sample", options)
    return model


@pytest.mark.parametrize("model", ["tiny_model", "odd"])
def test_every_document_is_that_of_the_corpus(model, request):
    lm = prismlm.load(request.getfixturevalue(model))
    corpus, documents = lm.lens.corpus, lm.lens.cells.documents
    source = OwnText(lm.lens.cells, Suffixes(lm.lens.path), lm.tokenizer)
    for number, doc_id in enumerate(documents.column("doc_id").to_pylist()):
        other = corpus.find(doc_id)
        start, length = int(corpus.starts[other]), int(corpus.lengths[other])
        assert int(source.starts[number]) == start
        assert source.document_at(start) == source.document_at(start + length - 1) == number
        expected = corpus.read_tokens(start, length)
        assert np.array_equal(source.read_tokens(start, length), expected)
        assert np.array_equal(source.read_tokens(start + 1, length - 1), expected[1:])
        assert source.text(number) == corpus.text(other)
        assert np.array_equal(source.spans(number), corpus.spans(other))


def test_a_model_without_its_corpus_answers_the_same_and_finds_it_again(
    tiny_model, tiny_corpus, small_corpus, tmp_path
):
    text = "The patient was given a dose of the drug"
    copy = shutil.copytree(tiny_model, tmp_path / "model")
    change_meta(copy / "lens" / "sample", corpus_path="/another/machine")
    with_corpus, without = prismlm.load(tiny_model), prismlm.load(copy)
    assert without.lens.corpus is None
    expected, trace = (lm.explain(text, generate=6) for lm in (with_corpus, without))
    same = {"model": "", "lens": ""}
    assert trace.to_dict(against=3) | same == expected.to_dict(against=3) | same
    assert trace.passages()[0].text
    assert trace.passages()[0].also == expected.passages()[0].also
    moved = shutil.copytree(tiny_corpus, tmp_path / "moved")
    assert prismlm.load(copy, corpus=moved).lens.corpus.path == moved
    with pytest.raises(InputError, match="is not the corpus that the lens sample"):
        prismlm.load(copy, corpus=small_corpus)
    shutil.rmtree(copy / "lens")
    with pytest.raises(InputError, match="has no lens"):
        prismlm.load(copy, corpus=moved)


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        ("One. Two is here. Three.", "is", "Two is here."),
        ("One line\nTwo is here\nThree", "is", "Two is here"),
        ('He said "no." Then he left! So', "left", "Then he left!"),
        ("One. Two is here.", " Two", " Two is here."),
        ("<|im_start|>It is so.<|im_end|>\n", "is", "It is so."),
    ],
)
def test_sentences(text, token, expected):
    left = text.index(token)
    around = sentence_around(text, left, left + len(token))
    assert around.token == token
    assert str(around).strip() == expected.strip()
    assert text[left - len(around.before) : left] == around.before


def test_adjacent_tokens_are_joined():
    text = " They went to war in 1763."
    for words, marked in (
        ([" went", " to", " war"], ["went to war"]),
        ([" They", " to", " 17", "63"], ["They", "to", "1763"]),
        ([" ", " in"], ["in"]),
    ):
        spans = [(text.index(word), text.index(word) + len(word)) for word in words]
        assert [text[slice(*span)] for span in joined(text, spans)] == marked


@pytest.mark.parametrize("table", ["index", "suffixes"])
def test_a_table_of_another_lens_is_not_read(tiny_model, tmp_path, monkeypatch, table):
    """However large, so that its digest is not compared."""
    monkeypatch.setattr(store, "COMPARED_BYTES", 0)
    lens = prismlm.load(shutil.copytree(tiny_model, tmp_path / "model")).lens
    change_meta(lens.path, tokens=1)
    with pytest.raises(StaleLensError, match="rebuilt or removed"):
        getattr(lens, table)


def test_a_lens_says_whether_it_had_enough_text():
    cases = {(0.5, 4): True, (0.51, 4): False, (0.5, 3): False}
    assert {(at, filled): verdict(at, 4, filled, 2)[0] for at, filled in cases} == cases


def test_a_lens_says_what_licences_its_text_has(lm):
    cells, shares = lm.lens.cells, Counter()
    found = {one["license"]: one["share"] for one in inspect_lens(lm.lens)["licenses"]}
    for number in cells.document_of(cells.records(np.arange(len(cells)))["position"]).tolist():
        shares[cells.facts(number)["license"] or "(unknown)"] += 1 / len(cells)
    assert found == pytest.approx(shares)
    assert list(found.values()) == sorted(found.values(), reverse=True)
