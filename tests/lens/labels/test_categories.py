"""Kinds of tokens, on tokens that are easily taken for others."""

import numpy as np
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.lens.labels.contexts import SUBJECTS, Vocabulary, subject_words


@pytest.fixture(scope="module")
def vocabulary(tiny_corpus):
    tokenizer = Corpus.open(tiny_corpus).tokenizer
    return Vocabulary(tokenizer, len(tokenizer) + 3)


def token(vocabulary, text):
    return vocabulary.texts.index(text)


@pytest.mark.parametrize(
    ("kind", "those", "others"),
    [
        ("continues", ["ing", "The"], [" the", ",", "\n", "1"]),
        ("open", [" the", "s"], [",", "\n", "1"]),
        ("digit", ["1"], [" the", ","]),
        ("line", ["\n"], [" ", " the"]),
        ("sign", [",", ".", "("], ["\n", " the", "1", " "]),
        ("markup", ["=", "_"], [",", ".", "("]),
        ("capital", [" The"], [" I", " the", "The"]),
    ],
)
def test_kinds(vocabulary, kind, those, others):
    held = getattr(vocabulary, kind)
    assert held.dtype == bool
    assert all(held[token(vocabulary, text)] for text in those)
    assert not any(held[token(vocabulary, text)] for text in others)


def test_a_subject_takes_words_near_its_own(tiny_corpus):
    vocabulary = Vocabulary(Corpus.open(tiny_corpus).tokenizer, 8192)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(vocabulary.texts), 64, generator=generator)
    names = list(SUBJECTS)
    number = {text: i for i, text in enumerate(vocabulary.texts)}
    known = {
        name: [word for word in SUBJECTS[name].split() if f" {word}" in number] for name in names
    }
    for direction, words in enumerate(known.values()):
        for word in words:
            weight[number[f" {word}"], direction] += 20
    # A word of no list, beside those of the subject with the most words that are tokens here.
    subject = max(names, key=lambda name: len(known[name]))
    assert len(known[subject]) >= 3
    weight[number[" said"], names.index(subject)] += 20
    # What all words vary in most, of whatever subject.
    weight[:, 50:58] = 300 * torch.randn(len(vocabulary.texts), 8, generator=generator)
    found = subject_words(weight, vocabulary)
    for word in ("said", known[subject][0]):
        row = found[vocabulary.words.index(word)].toarray()[0]
        assert row.tolist() == [float(name == subject) for name in names]
    # Each word is of one subject at most, and most are of none.
    of = np.asarray(found.sum(1)).ravel()
    assert of.max() == 1
    assert of.mean() < 0.2
