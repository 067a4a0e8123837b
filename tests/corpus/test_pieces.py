"""Tokens for display: parts of characters as bytes and never as U+FFFD, and words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.corpus.pieces import DITTO, encode, pieces_of, token_alone, token_words
from prismlm.errors import InputError
from tests.helpers.small_tokenizers import metaspace

BYTES = {f"<0x{number:02X}>": number for number in range(256)}


def wrapped(tokenizer, decoder):
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def alone(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token_alone(tokenizer, token) for token in ids]


def test_bytes_that_are_not_a_character():
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "âĢ", "âĢĻ"]
    merges = [("â", "Ģ"), ("âĢ", "Ļ")]
    byte_level = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, merges))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shown = alone(wrapped(byte_level, decoders.ByteLevel()), "a東’“")
    assert shown == ["a", "‹E6›", "‹9D›", "‹B1›", "’", "‹E2 80›", "‹9C›"]
    fallback = Tokenizer(models.BPE(BYTES | {"a": 256}, [], byte_fallback=True, unk_token="a"))
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert alone(wrapped(fallback, decoder), "a東") == ["a", "‹E6›", "‹9D›", "‹B1›"]
    # A character that is the replacement character itself.
    backend = Tokenizer(models.BPE({"ï": 0, "¿": 1, "½": 2, "ï¿": 3, "ï¿½": 4}, []))
    tokenizer = wrapped(backend, decoders.ByteLevel())
    assert [token_alone(tokenizer, n) for n in (4, 3)] == ["\ufffd", "‹EF BF›"]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_leading_space_of_a_token_is_kept(legacy):
    tokenizer = metaspace(["the girl and the girls"], legacy=legacy)
    assert alone(tokenizer, "the girl") == [" the", " girl"]
    ids = tokenizer("the girls and")["input_ids"]
    assert "".join(piece.shown for piece in pieces_of(tokenizer, ids)) == " the girls and"


@pytest.mark.parametrize(
    ("text", "spans", "words", "counts", "tokens"),
    [
        (
            "un told, it's",
            [(0, 1), (1, 2), (2, 5), (5, 7), (7, 8), (8, 11), (11, 13)],
            ("un", " told", ",", " it's"),
            (2, 2, 1, 2),
            ("u", "n", " to", "ld", ",", " it", "'s"),
        ),
        # ß in two tokens inside a word; 日本, letters without case, in three and one.
        (
            "Fuß日本",
            [(0, 2), (2, 3), (2, 3), (3, 4), (3, 4), (3, 4), (4, 5)],
            ("Fuß", "日", "本"),
            (3, 3, 1),
            ("Fu", "ß", DITTO, "日", DITTO, DITTO, "本"),
        ),
        # Spaces that no token touches.
        ("a  b", [(0, 1), (3, 4)], ("a", "  b"), (1, 1), ("a", "b")),
        # A passage that starts inside the text, and the end of a document.
        ("one two", [(3, 7), (7, 7)], (" two", ""), (1, 1), (" two", "")),
        # The first token holds the last byte of a character.
        ("ßx", [(0, 1), (1, 2)], ("ßx",), (2,), ("ß", "x")),
    ],
)
def test_tokens_are_merged_to_words(text, spans, words, counts, tokens):
    result = token_words(text, np.array(spans, dtype=np.int64))
    assert (result.words, result.counts, result.tokens) == (words, counts, tokens)
    assert result.word_of == tuple(np.repeat(np.arange(len(counts)), counts))


@given(text=st.text(min_size=1, max_size=40))
def test_words_join_to_the_text(corpus, text):
    ids, spans = encode(corpus.tokenizer, text)
    result = token_words(text, spans)
    assert "".join(result.words) == text
    assert sum(result.counts) == len(result.tokens) == len(ids)
    assert "�" not in "".join(result.tokens).replace(text, "") or "�" in text


def test_a_text_for_display_is_not_empty(corpus):
    with pytest.raises(InputError, match="empty"):
        encode(corpus.tokenizer, "")
