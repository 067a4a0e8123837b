"""A corpus cut into sequences of one length."""

import dataclasses

import pytest
import torch

from prismlm.corpus.sequences import Sequences
from tests.helpers.mixer_models import make_corpus

LENGTH = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


def test_every_token_is_read_once(corpus, sequences):
    positions = torch.cat([batch.positions[batch.owned] for batch in sequences.batches()])
    assert sorted(positions.tolist()) == list(range(corpus.num_tokens))
    few = Sequences(corpus, "all", LENGTH, max_tokens=1)
    assert len(list(few.batches())) == 1


def test_sequences_say_how_many_tokens_they_are(corpus, sequences):
    assert sequences.tokens == corpus.num_tokens
    assert dataclasses.replace(sequences, max_tokens=7).tokens == 7
    assert dataclasses.replace(sequences, max_tokens=10**9).tokens == corpus.num_tokens
    parts = [dataclasses.replace(sequences, split=split).tokens for split in ("train", "heldout")]
    assert sum(parts) == corpus.num_tokens
