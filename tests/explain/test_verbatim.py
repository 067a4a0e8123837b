"""Verbatim spans against all spans, each looked for in all places."""

import math
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm.explain.verbatim import verbatim_spans
from prismlm.lens.suffixes import Suffixes
from tests.helpers.lens_files import write_suffixes
from tests.helpers.token_corpus import TokenCorpus

TEXTS = (
    "the heart pumps blood through the body",
    "the old heart pumps blood",
    "blood through the body and the heart pumps",
)
WORDS = sorted({word for text in TEXTS for word in text.split()})


def ids(text):
    """Words as tokens, from 1; unknown ones are 99."""
    return [WORDS.index(word) + 1 if word in WORDS else 99 for word in text.split()]


@pytest.fixture(scope="module")
def suffixes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lens")
    write_suffixes(directory, TokenCorpus([ids(text) for text in TEXTS]), "all")
    return Suffixes(directory)


def test_a_hand_written_example(suffixes):
    answer = ids("say that the heart pumps blood through the body and soul")
    first, second = verbatim_spans(answer, suffixes, minimum=4)
    # Seven words of the first text; "blood through the body and" goes on in the third alone.
    assert (first.start, first.length, first.count, first.positions) == (2, 7, 1, (0,))
    assert (second.start, second.length, second.count, second.positions) == (5, 5, 1, (14,))
    shares = {word: ids(" ".join(TEXTS)).count(ids(word)[0]) / 20 for word in WORDS}
    drawn = [shares[word] for word in ["blood", "through", "the", "body", "and"]]
    assert second.rarity == pytest.approx(-sum(map(math.log2, drawn)))


def naive(corpus, tokens, bounds, minimum):
    """All spans between bounds that stand somewhere and lie in no other that does."""
    pairs = combinations(bounds, 2)
    standing = {(first, end) for first, end in pairs if corpus.places(tokens[first:end])}
    return {
        (first, end, len(corpus.places(tokens[first:end])))
        for first, end in standing
        if end - first >= minimum
        and not any(a <= first and end <= b and (a, b) != (first, end) for a, b in standing)
    }


letters = st.integers(1, 3)


@given(
    texts=st.lists(st.lists(letters, max_size=10), min_size=1, max_size=4),
    tokens=st.lists(letters, min_size=1, max_size=18),
    start=st.integers(0, 4),
    minimum=st.integers(1, 4),
)
def test_the_spans_are_those_that_trying_all_of_them_gives(texts, tokens, start, minimum):
    corpus, start = TokenCorpus(texts), min(start, len(tokens))
    bounds = list(range(start, len(tokens) + 1))
    with TemporaryDirectory() as directory:
        write_suffixes(Path(directory), corpus, "all")
        spans = verbatim_spans(tokens, Suffixes(Path(directory)), start, minimum=minimum)
    found = {(span.start, span.start + span.length, span.count) for span in spans}
    assert found == naive(corpus, tokens, bounds, minimum)
    assert len(found) == len(spans)
    order = [(-span.length, -span.rarity, span.start) for span in spans]
    assert order == sorted(order)
    for span in spans:
        places = corpus.places(tokens[span.start : span.start + span.length])
        assert span.positions == tuple(places[:5])
