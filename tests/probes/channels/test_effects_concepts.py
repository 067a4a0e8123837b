"""Channels of concepts: definitions against every position at once, and channels made to order."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.probes.channels import find_channels
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.effects import (
    continues_word,
    rank_channels,
    whole_words,
    word_ends,
    word_forms,
)
from tests.helpers.metaspace import metaspace
from tests.helpers.mixer_models import CHANNELS, make_model
from tests.helpers.planted_channels import PLACE, planted_model, words_by_tokens
from tests.probes.conftest import read_alone

LENGTH = 24


@pytest.fixture(scope="module")
def words(corpus):
    return words_by_tokens(corpus)


@pytest.fixture(scope="module")
def model(corpus):
    # In float64: float32 sums differ from processor to processor.
    return make_model(len(corpus.tokenizer)).double()


@pytest.fixture(scope="module")
def planted(corpus, words):
    return planted_model(corpus, words[0][0])


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


def read_of(*rows):
    """A text of these rows of tokens, of which nothing was read."""
    lengths = torch.tensor([len(row) for row in rows])
    return Activations(
        torch.tensor([token for row in rows for token in row]), lengths, lengths, lengths, {}
    )


def test_a_word_of_several_tokens_counts_at_the_last(corpus, model, sequences, words):
    word, read = words[1][0], read_activations(model, sequences, ("write",))
    forms = word_forms(corpus.tokenizer, [word])
    result = word_ends(corpus.tokenizer, forms, read)[word].tolist()
    expected, first = [], 0
    for length in read.lengths.tolist():
        texts = [corpus.tokenizer.decode([i]) for i in read.tokens[first : first + length].tolist()]
        for i in range(length):
            for j in range(i + 1, length + 1):
                follows = texts[j] if j < length else ""
                if "".join(texts[i:j]).lower() == f" {word.lower()}" and not follows[:1].isalnum():
                    expected.append(first + j - 1)
        first += length
    assert result == expected != []


@pytest.mark.parametrize("legacy", [False, True])
def test_words_are_found_where_a_decoder_drops_the_space_before_them(legacy):
    text = "the girl and the girls saw a girl"
    tokenizer = metaspace([text], legacy=legacy)
    ids = tokenizer(text)["input_ids"]
    forms, continues = word_forms(tokenizer, ["girl"]), continues_word(tokenizer)
    ends = word_ends(tokenizer, forms, read_of(ids))["girl"].tolist()
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert ends == [
        i for i, token in enumerate(tokens) if token == "▁girl" and tokens[i + 1 : i + 2] != ["s"]
    ]
    assert len(ends) == 2
    whole = whole_words(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        assert whole[number] == (token[:1] == "▁" and token[1:].isalpha() and len(token) > 3)
        assert continues[number] == token[:1].isalnum()


def test_a_word_ends_where_no_letter_follows():
    pieces = (" girl", "s", " Girl", "a b", ".", " x")
    known = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(known, [], ignore_merges=True))
    backend.decoder = decoders.Fuse()
    letters = PreTrainedTokenizerFast(tokenizer_object=backend)
    forms = word_forms(letters, ["girl"])
    assert forms == {"girl": ((0,), (2,))}
    # What two words have in common is the first one's.
    assert word_forms(letters, ["girl", "Girl"]) == forms
    assert word_forms(letters, ["Girl", "girl"]) == {"Girl": ((2,),), "girl": ((0,),)}
    continues = continues_word(letters)
    assert continues.tolist() == [False, True, False, True, False, False]
    assert whole_words(letters).tolist() == [True, False, True, False, False, False]
    # After the end of a sequence another begins, whatever token that is.
    read = read_of([0, 1, 0, 4, 2], [0, 5, 2], [1, 0])
    assert word_ends(letters, forms, read)["girl"].tolist() == [2, 4, 5, 7, 9]
    with pytest.raises(InputError, match="'boy' is not a word"):
        word_forms(letters, ["boy"])


def test_the_channel_of_a_word_is_found(corpus, planted, sequences, words):
    word, other = words[0][0], words[0][1]
    result = find_channels(
        planted, corpus.tokenizer, [word], sequences, shuffles=99, min_occurrences=5, count=99
    )
    best = result.rows[0]
    assert (best["layer"], best["channel"]) == PLACE
    token = corpus.tokenizer(f" {word}")["input_ids"][0]
    *_, rows, gates = zip(*read_alone(corpus, planted, LENGTH), strict=True)
    ids = torch.cat(rows)
    write = torch.cat([layers[0].write[0] for layers in gates])[:, PLACE[1]].double()
    # All of these words stand after a space and before another word.
    expected = (write[ids == token].mean() - write.mean()) / write.std(correction=0)
    assert best["difference"] == pytest.approx(expected.item(), rel=1e-4)
    assert best["at_words"] == pytest.approx(write[ids == token].mean().item(), rel=1e-4)
    assert best["mean"] == pytest.approx(write.mean().item(), rel=1e-4)
    assert result["words"] == {word: int((ids == token).sum())}
    ranked = [row["difference"] for row in result.rows]
    assert ranked == sorted(ranked, reverse=True)
    # A gate that never varies does not stand out at any word.
    assert [row["difference"] for row in result.rows if row["layer"] == 1] == [0] * CHANNELS
    assert result["p"] == 0.01
    assert result["shuffled_mean"] < best["difference"]
    # A word that no channel was made for does not stand out among words.
    weak = find_channels(
        planted, corpus.tokenizer, [other], sequences, shuffles=99, min_occurrences=5
    )
    assert weak["p"] > 0.01
    with pytest.raises(InputError, match=r"occur \d+ times in .* expected at least 100000"):
        find_channels(planted, corpus.tokenizer, [word], sequences, min_occurrences=100000)
    read = read_activations(planted, sequences, ("write",))
    assert rank_channels(read, corpus.tokenizer, [word], shuffles=99).rows == result.rows[:10]
