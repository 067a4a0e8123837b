"""Subjects take the words that are near theirs in the output embedding, and no others."""

import numpy as np
import torch

from prismlm.corpus import Corpus
from prismlm.labels.categories import CATEGORIES, SUBJECTS, subject_words
from prismlm.labels.vocabulary import Vocabulary


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


def test_there_are_the_fourteen_of_the_source():
    assert len(set(CATEGORIES)) == 14
