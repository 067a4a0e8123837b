import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import fingerprint, load_tokenizer, train_tokenizer
from prismlm.corpus.encode import text_encoder
from prismlm.corpus.tokenizer import END_OF_TEXT
from prismlm.errors import InputError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "naïve café"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS), 280)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(tokenizer, text):
    encoder = text_encoder(tokenizer.backend_tokenizer, END_OF_TEXT)
    ids = encoder.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_long_word_does_not_stall_training():
    trained = train_tokenizer(iter(["=" * 400_000, *TEXTS]), 280)
    assert trained.decode(trained.encode("=" * 1001)) == "=" * 1001


def test_training_and_saving_keep_the_fingerprint(tokenizer, tmp_path):
    assert fingerprint(train_tokenizer(iter(TEXTS), 280)) == fingerprint(tokenizer)
    assert fingerprint(train_tokenizer(iter(TEXTS), 281)) != fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert fingerprint(loaded) == fingerprint(tokenizer)
    loaded(TEXTS, padding=True, truncation=True, max_length=4)
    assert fingerprint(loaded) == fingerprint(tokenizer), "padding changes no document"
    loaded.add_tokens(["zebra"])
    assert fingerprint(loaded) != fingerprint(tokenizer)


WORDS = models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>")


def test_an_end_token_that_is_not_marked_special_is_text_too():
    backend = Tokenizer(WORDS)
    backend.add_tokens(["</s>"])
    assert 3 not in text_encoder(backend, "</s>").encode("a</s>b", add_special_tokens=False).ids


def test_tokenizers_that_cannot_be_used(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WORDS)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="Expected a directory"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(InputError, match="257"):
        train_tokenizer(iter(TEXTS), 256)
