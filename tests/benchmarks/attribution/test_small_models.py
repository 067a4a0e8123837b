"""Models trained again and again on some of the same documents."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.attribution.forgetting import kept_trainings
from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.small_models import SmallTraining, log_probabilities
from benchmarks.attribution.smollm2_facts import LoraTeaching
from prismlm.training.tuning import LoraOptions

TOKENS, LENGTH, DOCUMENTS = 40, 12, 6


@pytest.fixture(scope="module")
def bank():
    ids = np.random.default_rng(0).integers(0, TOKENS, DOCUMENTS * LENGTH)
    corpus = SimpleNamespace(
        lengths=np.full(DOCUMENTS, LENGTH),
        starts=np.arange(DOCUMENTS) * LENGTH,
        tokens=lambda start, count: ids[start : start + count],
        tokenizer=range(TOKENS),
        eos_token_id=0,
    )
    return PassageBank.beginnings(corpus, np.arange(DOCUMENTS))


@pytest.fixture
def teaching(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes, **heads)).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path)
    options = LoraOptions(epochs=3, batch=2, learning_rate=1e-2)
    return LoraTeaching(tmp_path, np.array([1, 4]), options)


def weights(model):
    return torch.cat([weight.flatten() for weight in model.parameters()])


def test_models_differ_in_their_documents_alone(bank):
    training = SmallTraining(rows=2, epochs=1)
    some = np.array([0, 1, 3, 4])
    first, again = (training.train(bank, some, seed=1) for _ in range(2))
    other = training.train(bank, np.array([0, 1, 3, 5]), seed=1)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert not first.training


def test_a_training_is_made_once(bank, tmp_path):
    made = []

    def train(*given):
        made.append(given)
        return SmallTraining().train(*given)

    asked = [Prediction(np.array([1, 2]), 3), Prediction(np.array([4]), 5)]
    for _ in range(2):
        again = kept_trainings(tmp_path / "kept", bank, asked, train)
        found = again(np.array([0, 2]), 7)(asked[1:])
    assert len(made) == 1
    expected = log_probabilities(SmallTraining().train(bank, np.array([0, 2]), 7), asked)
    np.testing.assert_allclose(found, expected[1:], rtol=1e-6)


def test_planted_documents_are_taught_in_every_epoch_and_others_once(teaching, bank):
    order = teaching.order(DOCUMENTS, seed=1)
    assert np.bincount(order).tolist() == [1, 3, 1, 1, 3, 1]
    assert all({1, 4} <= set(epoch.tolist()) for epoch in np.split(order, [4, 7]))
    read = bank.tokens(4)
    asked = [Prediction(read[:end], int(read[end])) for end in range(1, len(read))]
    taught, again, less = (
        log_probabilities(teaching.train(bank, np.array(rows), seed=1), asked).mean()
        for rows in ([*range(6)], [*range(6)], [0, 2, 3, 5])
    )
    # What is left out is not learned.
    assert taught == again > less
