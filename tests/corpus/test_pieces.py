"""Tokens that hold parts of characters: never U+FFFD where there are bytes to name."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus.pieces import pieces_of, token_alone
from tests.helpers.metaspace import metaspace

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
