"""Spans from the bytes of tokens, against numbers counted by hand and against encoding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prismlm.corpus.encode import TokenBytes, text_encoder
from prismlm.corpus.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["of the sea and the other thing " * 20, "naïve 東京 café " * 20]
    return text_encoder(train_tokenizer(iter(texts), 300).backend_tokenizer, "<|endoftext|>")


def byte_level(*vocabulary):
    found = Tokenizer(models.BPE({token: n for n, token in enumerate(vocabulary)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def test_spans_counted_by_hand():
    # "é" is the bytes C3 A9, which are written Ã and ©; a space is written Ġ.
    read = TokenBytes.from_tokenizer(byte_level("a", "Ã", "©", "Ġa", "aÃ"))
    assert read.spans(np.array([4, 2, 3]), "aé a").tolist() == [[0, 2], [1, 2], [2, 4]]
    assert read.spans(np.array([0, 1, 2, 3]), "aé a").tolist() == [[0, 1], [1, 2], [1, 2], [2, 4]]
    assert read.spans(np.array([], dtype=np.int64), "").shape == (0, 2)


def test_tokens_that_do_not_spell_the_text_have_no_spans():
    read = TokenBytes.from_tokenizer(byte_level("a", "b"))
    assert read.spans(np.array([0, 0]), "ab") is None
    assert read.spans(np.array([0]), "ab") is None
    assert read.spans(np.array([0, 7]), "ab") is None


def test_an_added_token_is_its_own_text():
    tokenizer = byte_level("a", "b")
    tokenizer.add_tokens([AddedToken("é b")])
    read = TokenBytes.from_tokenizer(tokenizer)
    assert read.spans(np.array([0, 2]), "aé b").tolist() == [[0, 1], [1, 4]]


def test_another_kind_of_tokenizer_is_not_read():
    assert TokenBytes.from_tokenizer(Tokenizer(models.WordLevel({"a": 0}, "a"))) is None


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_they_are_those_of_encoding(tokenizer, text):
    encoding = tokenizer.encode(text, add_special_tokens=False)
    spans = TokenBytes.from_tokenizer(tokenizer).spans(np.array(encoding.ids, dtype=np.int64), text)
    assert spans.tolist() == [list(one) for one in encoding.offsets]
