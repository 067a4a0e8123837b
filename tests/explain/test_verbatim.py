"""Verbatim spans against all spans, each looked for in all places."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus import build_corpus
from prismlm.corpus.words import encode, worded
from prismlm.errors import InputError
from prismlm.explain.verbatim import VerbatimSpan, verbatim_spans
from prismlm.index.suffixes import Suffixes, write_suffixes
from tests.helpers.records import RECORDS, write_jsonl
from tests.helpers.token_corpus import TokenCorpus

pytest.importorskip("pydivsufsort")

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
    return Suffixes.open(directory)


def test_a_hand_written_example(suffixes):
    answer = ids("say that the heart pumps blood through the body and soul")
    first, second = verbatim_spans(answer, suffixes, minimum=4)
    # Seven words of the first text; "blood through the body and" goes on in the third alone.
    assert (first.start, first.length, first.count, first.positions) == (2, 7, 1, (0,))
    assert (second.start, second.end, second.count, second.positions) == (5, 10, 1, (14,))
    shares = {word: ids(" ".join(TEXTS)).count(ids(word)[0]) / 20 for word in WORDS}
    drawn = [shares[word] for word in ["blood", "through", "the", "body", "and"]]
    assert second.rarity == pytest.approx(-sum(map(math.log2, drawn)))
    assert second.to_dict() == {
        "start": 5,
        "length": 5,
        "count": 1,
        "rarity": second.rarity,
        "positions": [14],
    }


def test_the_longest_come_first_then_the_rarest(suffixes):
    answer = ids("the body ! pumps blood ! the old heart ! heart pumps")
    spans = verbatim_spans(answer, suffixes, minimum=2)
    assert [span.start for span in spans] == [6, 3, 10, 0]
    assert [span.length for span in spans] == [3, 2, 2, 2]
    assert spans[1].rarity == spans[2].rarity > spans[3].rarity
    assert verbatim_spans(answer, suffixes, minimum=2, limit=2) == spans[:2]
    assert verbatim_spans(answer, suffixes, minimum=2, limit=None) == spans
    assert verbatim_spans(answer, suffixes) == []


def test_the_prompt_is_not_searched(suffixes):
    answer = ids("the heart pumps blood through the body")
    (span,) = verbatim_spans(answer, suffixes, 3, minimum=2)
    assert (span.start, span.length, span.count, span.positions) == (3, 4, 2, (3, 14))
    assert verbatim_spans(answer, suffixes, len(answer)) == []


def test_spans_begin_and_end_between_words(suffixes):
    # Of "theheart pumps bloodthrough thebody and" each stretch without a space is one word.
    answer, words = ids("the heart pumps blood through the body and"), [2, 1, 2, 2, 1]
    (span,) = verbatim_spans(answer[:6], suffixes, minimum=1, words=[2, 1, 2, 1])
    assert (span.start, span.end, span.count) == (0, 6, 1)
    spans = verbatim_spans(answer, suffixes, minimum=2, words=words)
    assert [(span.start, span.end) for span in spans] == [(0, 7), (3, 8)]
    # An answer may begin within a word of the prompt.
    spans = verbatim_spans(answer, suffixes, 1, minimum=2, words=words)
    assert [(span.start, span.end) for span in spans] == [(1, 7), (3, 8)]


def test_a_span_that_ends_within_a_word_is_cut_and_counted_anew(suffixes):
    (span,) = verbatim_spans(ids("pumps blood through me"), suffixes, minimum=1, words=[2, 2])
    assert (span.start, span.end, span.count, span.positions) == (0, 2, 2, (2, 11))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    return build_corpus(path, directory / "built", vocab_size=300)


def test_words_of_a_real_tokenizer_stay_whole(corpus, tmp_path):
    write_suffixes(tmp_path, corpus, "all")
    text = "The pumped heart pumps blooded"  # The first text has "blood", a part of a word here.
    tokens, places = encode(corpus.tokenizer, text)
    (span,) = verbatim_spans(
        tokens, Suffixes.open(tmp_path), minimum=9, words=worded(text, places).counts
    )
    assert text[places[span.start, 0] : places[span.end - 1, 1]] == " heart pumps "
    assert corpus.excerpt(span.positions[0], span.length) == " heart pumps "


def test_only_as_many_places_as_are_asked_for(suffixes):
    (span,) = verbatim_spans(ids("heart pumps"), suffixes, minimum=2, places=2)
    assert (span.count, span.positions) == (3, (1, 10))
    (span,) = verbatim_spans(ids("heart pumps"), suffixes, minimum=2, places=0)
    assert (span.count, span.positions) == (3, ())


def test_an_answer_that_ends_its_document_is_searched_up_to_the_end(suffixes):
    (span,) = verbatim_spans([*ids("the old heart"), 0], suffixes, minimum=2)
    assert (span.start, span.length) == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 4}, "start is 4: expected a whole number from 0 to 3"),
        ({"start": -1}, "start is -1"),
        ({"minimum": 0}, "length of a span is 0: expected a whole number from 1"),
        ({"limit": -1}, "number of spans is -1: expected a whole number from 0"),
        ({"places": -1}, "number of places is -1: expected a whole number from 0"),
        ({"words": [1, 1]}, "the words have 2 tokens and the text has 3"),
    ],
)
def test_wrong_arguments_are_refused(suffixes, options, message):
    with pytest.raises(InputError, match=message):
        verbatim_spans(ids("the old heart"), suffixes, **options)


def naive(corpus, tokens, bounds, minimum):
    """All spans between bounds that stand somewhere and lie in no other that does."""
    standing = {
        (first, end)
        for first in bounds
        for end in bounds
        if first < end and corpus.places(tokens[first:end])
    }
    return {
        (first, end, len(corpus.places(tokens[first:end])))
        for first, end in standing
        if end - first >= minimum
        and not any(a <= first and end <= b and (a, b) != (first, end) for a, b in standing)
    }


letters = st.integers(1, 3)


@given(
    texts=st.lists(st.lists(letters, max_size=10), min_size=1, max_size=4),
    words=st.lists(st.lists(letters, min_size=1, max_size=3), min_size=1, max_size=6),
    start=st.integers(0, 4),
    minimum=st.integers(1, 4),
    worded=st.booleans(),
)
def test_the_spans_are_those_that_trying_all_of_them_gives(texts, words, start, minimum, worded):
    corpus, tokens = TokenCorpus(texts), [token for word in words for token in word]
    start, counts = min(start, len(tokens)), [len(word) for word in words]
    ends = np.cumsum(counts).tolist() if worded else range(len(tokens) + 1)
    bounds = sorted({start, *(end for end in ends if end >= start)})
    with TemporaryDirectory() as directory:
        write_suffixes(Path(directory), corpus, "all")
        spans = verbatim_spans(
            tokens,
            Suffixes.open(directory),
            start,
            minimum=minimum,
            limit=None,
            words=counts if worded else None,
        )
    found = {(span.start, span.end, span.count) for span in spans}
    assert found == naive(corpus, tokens, bounds, minimum)
    assert len(found) == len(spans)
    order = [(-span.length, -span.rarity, span.start) for span in spans]
    assert order == sorted(order)
    for span in spans:
        assert_stands_and_cannot_grow(corpus, tokens, span, bounds)


def assert_stands_and_cannot_grow(corpus, tokens, span: VerbatimSpan, bounds):
    places = corpus.places(tokens[span.start : span.end])
    assert span.positions == tuple(places[:5])
    left, right = bounds.index(span.start), bounds.index(span.end)
    if left:
        assert not corpus.places(tokens[bounds[left - 1] : span.end])
    if right + 1 < len(bounds):
        assert not corpus.places(tokens[span.start : bounds[right + 1]])
