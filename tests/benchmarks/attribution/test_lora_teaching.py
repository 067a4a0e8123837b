from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.small_models import log_probabilities
from benchmarks.attribution.smollm2_setting import LoraTeaching
from prismlm.training.tuning import LoraOptions

TOKENS, LENGTHS = 40, (5, 7, 6, 4, 7, 3)


@pytest.fixture(scope="module")
def bank():
    ids = np.random.default_rng(0).integers(0, TOKENS, sum(LENGTHS))
    corpus = SimpleNamespace(
        lengths=np.array(LENGTHS),
        starts=np.cumsum(LENGTHS) - LENGTHS,
        tokens=lambda start, count: ids[start : start + count],
    )
    return PassageBank.beginnings(corpus, np.arange(len(LENGTHS)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    directory = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(directory)
    return directory


@pytest.fixture
def teaching(base):
    options = LoraOptions(epochs=3, batch=2, learning_rate=1e-2)
    return LoraTeaching(base, np.array([1, 4]), options)


def test_planted_documents_are_read_in_every_epoch_and_others_once(teaching):
    order = teaching.order(len(LENGTHS), seed=1)
    assert np.bincount(order).tolist() == [1, 3, 1, 1, 3, 1]
    assert all({1, 4} <= set(epoch.tolist()) for epoch in np.split(order, [4, 7]))


def test_what_is_read_often_is_learned_and_what_is_left_out_is_not(teaching, bank):
    everything, without = np.arange(6), np.array([0, 2, 3, 5])
    read = bank.tokens(4)
    asked = [Prediction(read[:end], int(read[end])) for end in range(1, len(read))]
    taught, again, less = (
        log_probabilities(teaching.train(bank, rows, seed=1), asked).mean()
        for rows in (everything, everything, without)
    )
    assert taught == again
    assert taught > less
