from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.attribution.forgetting import kept_trainings
from benchmarks.attribution.judges.passages import PassageBank, Prediction
from benchmarks.attribution.small_models import (
    IGNORED,
    SmallTraining,
    log_probabilities,
    padded,
)

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


def test_texts_are_padded_without_labels():
    ids, labels = padded([np.array([3, 4, 5]), np.array([6])])
    assert ids.tolist() == [[3, 4, 5], [6, 0, 0]]
    assert labels.tolist() == [[3, 4, 5], [6, IGNORED, IGNORED]]


def test_a_training_is_made_once(bank, tmp_path, monkeypatch):
    made = []
    train = SmallTraining.train

    def counted(self, *arguments):
        made.append(arguments)
        return train(self, *arguments)

    monkeypatch.setattr(SmallTraining, "train", counted)
    asked = [Prediction(np.array([1, 2]), 3), Prediction(np.array([4]), 5)]
    for _ in range(2):
        again = kept_trainings(tmp_path / "kept", bank, asked, SmallTraining())
        found = again(np.array([0, 2]), 7)(asked[1:])
    assert len(made) == 1
    expected = log_probabilities(train(SmallTraining(), bank, np.array([0, 2]), 7), asked)
    np.testing.assert_allclose(found, expected[1:], rtol=1e-6)
