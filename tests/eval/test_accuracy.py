import math

import pytest

from prismlm.eval.accuracy import mean_figures, task_figures


def answers(plain, prototype_only, gold=(0, 1, 1, 1), choices=(2, 4, 4, 4)):
    return {
        "task": "some",
        "of": 9,
        "chosen": [0, 2, 3, 8],
        "gold": list(gold),
        "choices": list(choices),
        "truncated": 1,
        "correct": {"plain": {"acc": plain}, "prototype_only": {"acc": prototype_only}},
    }


def test_figures_by_hand():
    found = task_figures(answers([1, 1, 0, 1], [1, 0, 0, 1]))
    assert (found["questions"], found["of"], found["truncated"]) == (4, 9, 1)
    assert found["chance"] == pytest.approx((1 / 2 + 3 / 4) / 4)
    assert found["most_common"] == 0.75
    plain, parts = (found["predictors"][name]["acc"] for name in ("plain", "prototype_only"))
    # s² of (1, 1, 0, 1) is 1/4 · 4/3 · 3/4 = 1/4.
    assert plain == {"value": 0.75, "stderr": pytest.approx(math.sqrt(0.25 / 4))}
    # Differences (0, −1, 0, 0) have s² = 1/4 too: the error of the change is 0.25 / 0.75.
    assert parts["value"] == 0.5
    assert parts["change"] == pytest.approx(-100 / 3)
    assert parts["change_stderr"] == pytest.approx(100 * 0.25 / 0.75)


def test_a_mean_over_tasks_by_hand():
    tasks = [
        task_figures(answers([1, 1, 0, 1], [1, 0, 0, 1])),
        task_figures(answers([1, 0, 0, 0], [1, 1, 0, 0])),
    ]
    found = mean_figures(tasks)
    assert found["plain"]["value"] == 0.5
    assert found["plain"]["stderr"] == pytest.approx(math.sqrt(2 * 0.25**2) / 2)
    assert found["prototype_only"]["value"] == 0.5
    assert found["prototype_only"]["change"] == 0
    assert found["prototype_only"]["change_stderr"] == pytest.approx(
        100 * math.sqrt(2 * 0.25**2) / 2 / 0.5
    )


def test_nothing_right_and_a_single_question_have_no_change_and_no_error():
    found = task_figures(answers([0, 0, 0, 0], [1, 0, 0, 0]))
    assert found["predictors"]["prototype_only"]["acc"]["change"] is None
    single = answers([1], [0], gold=[1], choices=[4])
    found = task_figures(single)["predictors"]
    assert found["plain"]["acc"] == {"value": 1.0, "stderr": None}
    assert found["prototype_only"]["acc"]["change"] == -100
    assert found["prototype_only"]["acc"]["change_stderr"] is None
    assert mean_figures([task_figures(single)])["prototype_only"]["change_stderr"] is None
