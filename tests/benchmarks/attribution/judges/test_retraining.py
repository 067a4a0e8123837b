import numpy as np
import pytest

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.judges.retraining import (
    forgetting,
    linear_datamodeling,
    random_subsets,
)


def test_lds_by_hand():
    subsets = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=bool)
    scores = np.array([[1, 2, 4], [0, 0, 0]])
    # Summed over the subsets: 3, 6, 5.
    outputs = np.array([[-3.0, -1.0, -2.0], [-1.0, -2.0, -3.0]])
    assert linear_datamodeling(scores, subsets, outputs).tolist() == pytest.approx([1, 0])
    assert linear_datamodeling(scores, subsets, -outputs).tolist() == pytest.approx([-1, 0])


def test_subsets_are_halves_and_a_seed_decides_them():
    subsets = random_subsets(10, 6, seed=3)
    assert subsets.sum(1).tolist() == [5] * 6
    assert len({row.tobytes() for row in subsets}) > 1
    assert np.array_equal(subsets, random_subsets(10, 6, seed=3))


def test_what_is_forgotten_is_what_the_missing_documents_gave():
    gave = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])

    def train(rows, seed):
        def outputs(predictions):
            return np.array([gave[p.target, rows].sum() * seed for p in predictions])

        return outputs

    asked = [Prediction(np.array([0]), target) for target in (0, 1)]
    lost = forgetting(train, 3, asked, np.array([[0, 2], [1, 2]]), seeds=(1, 10))
    assert lost.tolist() == [[5, 50], [48, 480]]
    # One model without 0, 1 and 2 has nothing left of either.
    lost = forgetting(train, 3, asked, np.array([[0, 2], [1, 2]]), seeds=(1,), together=2)
    assert lost.tolist() == [[7], [56]]
