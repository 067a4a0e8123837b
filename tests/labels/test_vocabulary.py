"""Kinds of tokens, on tokens that are easily taken for others."""

import numpy as np
import pytest

from prismlm.corpus import Corpus
from prismlm.labels.vocabulary import FUNCTION, Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tiny_corpus):
    tokenizer = Corpus.open(tiny_corpus).tokenizer
    return Vocabulary(tokenizer, len(tokenizer) + 3)


def token(vocabulary, text):
    return vocabulary.texts.index(text)


def test_every_token_has_its_text_and_word(vocabulary):
    assert len(vocabulary.word) == len(vocabulary.texts)
    # Rows of the embedding that no token has.
    assert vocabulary.texts[-3:] == ["", "", ""]
    the = {vocabulary.word[token(vocabulary, text)] for text in (" the", " The", "The")}
    assert len(the) == 1
    assert vocabulary.words[the.pop()] == "the"


@pytest.mark.parametrize(
    ("kind", "those", "others"),
    [
        ("goes_on", ["ing", "The"], [" the", ",", "\n", "1"]),
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


def test_words_with_content_are_no_function_words(vocabulary):
    words = {vocabulary.words[word] for word in vocabulary.word[vocabulary.content]}
    assert words
    assert not words & FUNCTION
    assert "said" in words
    np.testing.assert_array_equal(
        np.flatnonzero(vocabulary.among(frozenset(["the"]))),
        [i for i, text in enumerate(vocabulary.texts) if text.strip().lower() == "the"],
    )
