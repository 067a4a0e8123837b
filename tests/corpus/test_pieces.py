"""Tokens for display: parts of characters as bytes and never as U+FFFD, and words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus.pieces import DITTO, encode, pieces_of, token_alone, token_words
from prismlm.errors import InputError
from tests.helpers.metaspace import metaspace
from tests.helpers.mixer_models import make_corpus

BYTES = {f"<0x{number:02X}>": number for number in range(256)}


def wrapped(tokenizer, decoder):
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("â", "Ģ"), ("â" + "Ģ", "Ļ")]
    letters = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrapped(tokenizer, decoders.ByteLevel())


@pytest.fixture(scope="module")
def byte_fallback():
    tokenizer = Tokenizer(models.BPE(BYTES | {"a": 256}, [], byte_fallback=True, unk_token="a"))
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(tokenizer, decoder)


def alone(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token_alone(tokenizer, token) for token in ids]


def test_bytes_of_a_byte_level_vocabulary(byte_level):
    assert alone(byte_level, "a東’“") == ["a", "‹E6›", "‹9D›", "‹B1›", "’", "‹E2 80›", "‹9C›"]


def test_a_character_that_is_the_replacement_itself_stays():
    tokenizer = Tokenizer(models.BPE({"ï": 0, "¿": 1, "½": 2, "ï¿": 3, "ï¿½": 4}, []))
    own = wrapped(tokenizer, decoders.ByteLevel())
    assert token_alone(own, 4) == "\ufffd"
    assert token_alone(own, 3) == "‹EF BF›"


def test_bytes_that_stand_for_unknown_characters(byte_fallback):
    assert alone(byte_fallback, "a東") == ["a", "‹E6›", "‹9D›", "‹B1›"]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_space_that_a_token_begins_with_stays(legacy):
    tokenizer = metaspace(["the girl and the girls"], legacy=legacy)
    assert alone(tokenizer, "the girl") == [" the", " girl"]
    ids = tokenizer("the girls and")["input_ids"]
    assert "".join(piece.shown for piece in pieces_of(tokenizer, ids)) == " the girls and"


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
