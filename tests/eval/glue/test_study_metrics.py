import numpy as np
import pytest

from prismlm.eval.glue.data import tasks_of
from prismlm.eval.glue.study import METRICS, answers, constant, interval, measure

GOLD = np.array([1, 1, 1, 0, 0, 0, 0, 1])
GIVEN = np.array([1, 1, 0, 0, 0, 0, 1, 1])  # tp 3, fn 1, fp 1, tn 3


def task(name):
    return tasks_of([name])[0]


def test_metrics_by_hand():
    assert measure(task("rte"), GOLD, GIVEN) == {"accuracy": 6 / 8}
    found = measure(task("mrpc"), GOLD, np.array([1, 1, 0, 0, 0, 0, 0, 0]))
    assert found == pytest.approx({"f1": 2 * 2 / (4 + 2), "accuracy": 6 / 8})
    # (3·3 − 1·1) / √(4·4·4·4)
    assert measure(task("cola"), GOLD, GIVEN) == pytest.approx({"matthews": 8 / 16})
    scores, said = np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0, 3.5])
    found = measure(task("stsb"), scores, said)
    # Σ xy / √(Σ x² Σ y²), with x = −2, −1, 0, 3 and y = −1.375, −0.375, 0.625, 1.125.
    assert found["pearson"] == pytest.approx(6.5 / np.sqrt(14 * 3.6875))
    assert found["spearman"] == pytest.approx(1.0)


def test_answers_that_are_all_alike_correlate_with_nothing():
    alike = np.ones(8)
    for metric in ("matthews", "pearson", "spearman"):
        assert METRICS[metric](GOLD, alike) == 0
    assert METRICS["f1"](GOLD, 0 * alike) == 0


def test_a_constant_answer():
    gold = np.array([0, 0, 0, 1])
    assert constant("accuracy", gold) == 3 / 4
    assert constant("f1", gold) == 2 * 1 / (4 + 1)  # always 1
    assert constant("matthews", gold) == constant("pearson", gold) == 0


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews", "pearson"])
def test_an_interval_is_round_the_mean_of_the_same_metric(metric):
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 2, 200)
    given = [np.where(rng.random(200) < 0.8, gold, 1 - gold) for _ in range(2)]
    found = interval(metric, gold, given)
    assert found.value == pytest.approx(np.mean([METRICS[metric](gold, one) for one in given]))
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.3


def test_outputs_become_classes_or_scores_within_their_range():
    assert answers(task("mnli"), np.array([[0, 2, 1], [3, 0, 0]])).tolist() == [1, 0]
    assert answers(task("stsb"), np.array([[-0.5], [2.5], [7]])).tolist() == [0, 2.5, 5]
