"""Tokens merged to words, by hand and for any text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus.pieces import DITTO, encode, token_words
from prismlm.errors import InputError
from tests.helpers.mixer_models import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def spans(*pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def test_pieces_of_a_word_go_together_and_spaces_part_words():
    found = token_words(
        "un told, it's", spans((0, 1), (1, 2), (2, 5), (5, 7), (7, 8), (8, 11), (11, 13))
    )
    assert found.words == ("un", " told", ",", " it's")
    assert found.counts == (2, 2, 1, 2)
    assert found.tokens == ("u", "n", " to", "ld", ",", " it", "'s")
    assert found.word_of == (0, 0, 1, 1, 2, 3, 3)


def test_a_quote_after_a_word_is_no_part_of_it():
    assert token_words("it' s", spans((0, 2), (2, 3), (3, 5))).words == ("it", "'", " s")


def test_bytes_of_a_character_stay_together_and_letters_without_case_apart():
    # ß in two tokens inside of a word; 日本 in three and one.
    found = token_words("Fuß日本", spans((0, 2), (2, 3), (2, 3), (3, 4), (3, 4), (3, 4), (4, 5)))
    assert found.words == ("Fuß", "日", "本")
    assert found.counts == (3, 3, 1)
    assert found.tokens == ("Fu", "ß", DITTO, "日", DITTO, DITTO, "本")


def test_a_mark_goes_with_its_letter():
    assert token_words("क\u093e x", spans((0, 1), (1, 2), (2, 4))).words == ("क\u093e", " x")


def test_spaces_that_no_token_has_part_words_and_are_kept():
    found = token_words("a  b", spans((0, 1), (3, 4)))
    assert found.words == ("a", "  b")


def test_the_end_of_a_document_is_an_empty_word_and_a_passage_may_start_inside():
    found = token_words("one two", spans((3, 7), (7, 7)))
    assert found.words == (" two", "")
    assert found.counts == (1, 1)
    # Its first token holds the last byte of a character.
    assert token_words("ßx", spans((0, 1), (1, 2))).tokens == ("ß", "x")


@given(text=st.text(min_size=1, max_size=40))
def test_words_are_the_text_whatever_it_is(corpus, text):
    ids, places = encode(corpus.tokenizer, text)
    found = token_words(text, places)
    assert "".join(found.words) == text
    assert sum(found.counts) == len(found.tokens) == len(ids)
    assert "�" not in "".join(found.tokens).replace(text, "") or "�" in text


def test_special_tokens_in_a_text_are_text(corpus):
    ids, _ = encode(corpus.tokenizer, "a<|endoftext|>b")
    assert corpus.eos_token_id not in ids
    with pytest.raises(InputError, match="empty"):
        encode(corpus.tokenizer, "")
