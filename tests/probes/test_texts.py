"""Texts that are too short for probes."""

import pytest

from prismlm.corpus.documents import Document
from prismlm.errors import InputError
from prismlm.probes.texts import document_sample


def test_texts_without_a_predicted_token_are_left_out(corpus):
    texts = [Document("0", "Old maps, the river."), Document("1", "e")]
    sample = document_sample(texts, corpus.tokenizer, texts=4, tokens=8)
    assert (len(sample.texts), sample.left_out) == (1, 1)
    with pytest.raises(InputError, match="the first token of a text is not predicted"):
        document_sample(texts[1:], corpus.tokenizer, texts=4, tokens=8)
