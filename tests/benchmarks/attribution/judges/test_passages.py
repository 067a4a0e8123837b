from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.attribution.judges.passages import (
    PassageBank,
    answer_predictions,
    answer_scores,
    best,
    halves,
    mean_with_error,
)


def corpus(*lengths):
    length = np.array(lengths)
    ids = np.arange(length.sum(), dtype=np.uint16)
    return SimpleNamespace(
        lengths=length,
        starts=np.cumsum(length) - length,
        tokens=lambda start, count: ids[start : start + count],
    )


def test_documents_are_cut_evenly():
    # Documents of 5, 3 and 9 tokens; the second is left out. 9 in pieces of at most 4 is 3 × 3.
    bank = PassageBank.of(corpus(5, 3, 9), np.array([0, 2]), tokens=4)
    assert bank.first.tolist() == [0, 2, 8, 11, 14]
    assert bank.length.tolist() == [2, 3, 3, 3, 3]
    assert bank.document.tolist() == [0, 0, 1, 1, 1]
    assert bank.tokens(2).tolist() == [8, 9, 10]
    assert len(bank) == 5


def test_beginnings_are_one_passage_a_document():
    bank = PassageBank.beginnings(corpus(5, 3, 9), np.array([0, 1, 2]), tokens=4)
    assert bank.first.tolist() == [0, 5, 8]
    assert bank.length.tolist() == [4, 3, 4]
    assert bank.document.tolist() == [0, 1, 2]


def test_a_position_is_in_its_passage_or_in_none():
    bank = PassageBank.of(corpus(5, 3, 9), np.array([0, 2]), tokens=4)
    positions = np.array([0, 1, 2, 4, 5, 7, 8, 16, 17])
    assert bank.passage_at(positions).tolist() == [0, 0, 1, 1, -1, -1, 2, 4, -1]
    later = PassageBank.of(corpus(5, 3), np.array([1]), tokens=4)
    assert later.passage_at(np.array([4, 5])).tolist() == [-1, 0]


def test_a_document_has_the_sum_of_its_passages_or_the_best():
    bank = PassageBank.of(corpus(5, 3, 9), np.array([0, 2]), tokens=4)
    scores = np.array([[1, 2, 4, 8, 16], [0, 0, -1, 0, 3]], dtype=np.float32)
    assert bank.by_document(scores).tolist() == [[3, 28], [0, 2]]
    assert bank.by_document(scores, best=True).tolist() == [[2, 16], [0, 3]]


def test_the_best_are_in_order_and_of_equals_the_first():
    scores = np.array([[1.0, 3.0, 3.0, 2.0]])
    assert best(scores, 3).tolist() == [[1, 2, 3]]


def test_an_answer_is_predicted_token_by_token():
    first, second = answer_predictions([7, 8], [9, 10], document=3)
    assert (first.ids.tolist(), first.target, first.document) == ([7, 8], 9, 3)
    assert (second.ids.tolist(), second.target) == ([7, 8, 9], 10)


def test_predictions_of_an_answer_count_alike_or_by_weight():
    scores = np.array([[1, 3, 0], [0, 0, 8], [0, 0, 0], [-1, 0, 1]], dtype=np.float32)
    question = np.array([0, 0, 0, 1])
    expected = [[0.25, 0.75, 1.0], [-0.5, 0, 0.5]]
    np.testing.assert_allclose(answer_scores(scores, question), expected)
    weighed = answer_scores(scores, question, np.array([4.0, 0.5, 9.0, 0.0]))
    np.testing.assert_allclose(weighed, [[1, 3, 0.5], [0, 0, 0]])


def test_halves_are_drawn_by_seed():
    first = halves(9, seed=1)
    assert first.sum() == 4
    assert np.array_equal(first, halves(9, seed=1))
    assert not np.array_equal(first, halves(9, seed=2))


def test_mean_with_its_error():
    found = mean_with_error(np.array([1.0, 3.0, 5.0, 7.0]))
    assert found["mean"] == 4
    # Of a sample the variance is 20 / 3, of a mean of four a quarter of that.
    assert found["error"] == pytest.approx(np.sqrt(20 / 12))
