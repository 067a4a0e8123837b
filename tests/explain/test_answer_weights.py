"""What counts in a whole answer: by hand, and what stays the same."""

import numpy as np
import pytest

from prismlm.explain.answer_weights import LEAST, focused, token_weights

# Two predictions; the first falls on documents 0 and 1 alike, the second on document 0 alone.
PREDICTION, DOCUMENT = np.array([0, 0, 1]), np.array([0, 1, 0])
PART = np.array([1.0, 1.0, 3.0])
RATES = np.array([0.5, 0.5])


def test_a_token_counts_by_what_it_tells():
    rates = np.exp([-2.0, -5.0, -7.0])
    found = token_weights(rates, 10**6, common=5.0)
    assert found == pytest.approx([LEAST, LEAST, LEAST + 4])
    # What never comes next counts as half a position: in a small corpus that says little.
    telling = np.log(2e4) - 5
    assert token_weights(np.zeros(1), 10**4)[0] == pytest.approx(LEAST + telling**2)
    assert token_weights(np.zeros(1), 50) == pytest.approx([LEAST])


def test_one_round_by_hand():
    # Carried: 1.5 of document 0 and 0.5 of 1, over their rates 3 and 1; with a = 1, 4 and 2.
    found = focused(PREDICTION, DOCUMENT, PART, np.ones(2), RATES, rounds=1, prior=1.0)
    assert found == pytest.approx([4 / 3, 2 / 3, 3])


def test_a_telling_token_decides_more():
    # Weights 0.5 and 1.5: carried 0.25 + 1.5 and 0.25, over their rates 3.5 and 0.5.
    weights = np.array([1.0, 3.0])
    found = focused(PREDICTION, DOCUMENT, PART, weights, RATES, rounds=1, prior=1.0)
    assert found[:2] == pytest.approx([2 * 4.5 / 6, 2 * 1.5 / 6])


def test_the_evidence_of_each_prediction_stays():
    generator = np.random.default_rng(0)
    prediction = np.sort(generator.integers(0, 9, 300))
    document = generator.integers(0, 40, 300)
    part = generator.random(300) * (prediction != 4)
    rates = generator.dirichlet(np.ones(40))
    weights = generator.random(9)
    for rounds in (0, 1, 5):
        found = focused(prediction, document, part, weights, rates, rounds=rounds)
        for number in range(9):
            own = prediction == number
            assert found[own].sum() == pytest.approx(part[own].sum())
    unfocused = focused(prediction, document, part, weights, rates, rounds=0)
    assert unfocused == pytest.approx(part)


def test_a_single_prediction_keeps_its_documents_where_all_are_as_likely():
    found = focused(PREDICTION[:2], DOCUMENT[:2], PART[:2], np.ones(1), RATES)
    assert found == pytest.approx([1, 1])
