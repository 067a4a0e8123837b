import math

import numpy as np
import pytest
from lm_eval.evaluator import evaluate

from prismlm.errors import FormatError, InputError
from prismlm.eval import suite
from prismlm.eval.predictors import open_predictors
from prismlm.interventions.suppression import Way
from tests.helpers.eval_data import write_benchmarks

TASKS = ("arc_easy", "piqa", "winogrande")
(PIQA,) = suite.select_benchmarks("seed", ["piqa"])


def test_an_unreachable_hub_and_a_copy_that_is_not_whole_are_named(tmp_path):
    with pytest.raises(InputError, match=r"documents of piqa cannot be downloaded .*--data"):
        suite.load_tasks(PIQA, suite.SuiteOptions())
    copy = write_benchmarks(tmp_path, "piqa") / "baber" / "piqa"
    # As git without LFS leaves it.
    (copy / "validation.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FormatError, match=r"baber/piqa does not hold the questions of piqa \("):
        suite.select_questions(PIQA, suite.SuiteOptions(data=tmp_path))


def test_a_question_without_a_right_answer_is_named(tmp_path):
    rows = [{"goal": "g", "sol1": "a", "sol2": "b", "label": n} for n in (0, 1, -1)]
    options = suite.SuiteOptions(data=write_benchmarks(tmp_path, "piqa", rows=rows))
    where = f"row 2 of the validation set of piqa in {tmp_path}/baber/piqa"
    with pytest.raises(FormatError, match=f"{where} has the label -1: expected"):
        suite.select_questions(PIQA, options)


# -- a suite on one model


@pytest.fixture(scope="module")
def lm(tiny_model):
    return open_predictors(tiny_model, batch_size=3)


@pytest.fixture
def options(tmp_path):
    return suite.SuiteOptions(data=write_benchmarks(tmp_path / "data", *TASKS))


def test_accuracies_equal_those_of_lm_evals_evaluator(lm, options, tmp_path):
    result = suite.run_suite(lm, "tiny", tmp_path / "out", options, TASKS)
    assert [task["title"] for task in result["tasks"]] == ["ARC-Easy", "PIQA", "WinoGrande"]
    assert result["predictors"] == ["plain", "prototype_only", "residual_only"]
    tasks = [suite.load_tasks(item, options)[0] for item in suite.select_benchmarks("seed", TASKS)]
    for predictor in result["predictors"]:
        lm.predictor = predictor
        by_name = {task.task_name: task for task in tasks}
        expected = evaluate(lm, by_name, bootstrap_iters=0, log_samples=False)["results"]
        for task in result["tasks"]:
            for metric, figure in task["predictors"][predictor].items():
                assert figure["value"] == expected[task["task"]][f"{metric},none"]
    lm.predictor = "plain"


def test_other_options_and_another_model_are_refused(lm, options, tmp_path, tiny_model):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"aps/super_glue is not a directory: .*boolq needs"):
        suite.run_suite(lm, "tiny", out, suite.SuiteOptions(data=options.data, seed=3), ["boolq"])
    # Without an answer, the settings of that run bind nobody.
    suite.run_suite(lm, "tiny", out, options, ["piqa"])
    with pytest.raises(InputError, match=r"other settings \(limit: None → 1\).*--out"):
        suite.run_suite(lm, "tiny", out, suite.SuiteOptions(data=options.data, limit=1), ["piqa"])
    other = open_predictors(tiny_model)
    other.model.get_input_embeddings().weight.data += 1
    with pytest.raises(InputError, match=r"other settings \(model: "):
        suite.run_suite(other, "tiny", out, options, ["piqa"])


def test_a_limit_samples_questions_by_the_seed(options):
    rows = [{"goal": f"number {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(50)]
    write_benchmarks(options.data, "piqa", rows=rows)

    def sample(seed):
        options_of_seed = suite.SuiteOptions(data=options.data, limit=9, seed=seed)
        questions, count = suite.select_questions(PIQA, options_of_seed)
        assert count == 50
        for question in questions:
            assert question.pairs[0] == (f"Question: number {question.number}\nAnswer:", " a")
        return [question.number for question in questions]

    first = sample(0)
    assert len(set(first)) == 9
    assert first == sorted(first) == sample(0) != sample(1)


def answers(plain, prototype_only, choices=(2, 4, 4, 4)):
    return {
        "task": "name",
        "of": 9,
        "chosen": [0, 2, 3, 8],
        "choices": list(choices),
        "correct": {"plain": {"acc": plain}, "prototype_only": {"acc": prototype_only}},
    }


def test_figures_by_hand():
    figures = suite.task_figures(answers([1, 1, 0, 1], [1, 0, 0, 1]))
    assert [figures[name] for name in ("questions", "of")] == [4, 9]
    assert figures["chance"] == pytest.approx((1 / 2 + 3 / 4) / 4)
    plain, prototypes = (figures["predictors"][n]["acc"] for n in ("plain", "prototype_only"))
    # s² of (1, 1, 0, 1) is 1/4 · 4/3 · 3/4 = 1/4.
    assert plain == {"value": 0.75, "stderr": pytest.approx(math.sqrt(0.25 / 4))}
    # Differences (0, −1, 0, 0) have s² = 1/4 too: the error of the change is 0.25 / 0.75.
    assert prototypes["value"] == 0.5
    assert prototypes["change"] == pytest.approx(-100 / 3)
    assert prototypes["change_stderr"] == pytest.approx(100 * 0.25 / 0.75)
    # Without a right answer there is no change, with a single question no error.
    none_right = suite.mean_figures([answers([0] * 4, [1, 0, 0, 0])])["prototype_only"]
    assert math.isnan(none_right["change"])
    single = suite.mean_figures([answers([1], [0], choices=[4])])["prototype_only"]
    assert single["change"] == -100
    assert math.isnan(single["change_stderr"])
    # A mean over tasks.
    tasks = [answers([1, 1, 0, 1], [1, 0, 0, 1]), answers([1, 0, 0, 0], [1, 1, 0, 0])]
    means, error = suite.mean_figures(tasks), pytest.approx(math.sqrt(2 * 0.25**2) / 2)
    assert means["plain"] == {"value": 0.5, "stderr": error}
    assert (means["prototype_only"]["value"], means["prototype_only"]["change"]) == (0.5, 0)
    assert means["prototype_only"]["change_stderr"] / 200 == error


def test_points_under_a_way_by_hand(monkeypatch):
    """Differences (0, −1, 0, 0), (0, 1, 0, 0), of 25 points standard error."""
    pair = [answers([1, 1, 0, 1], [1, 0, 0, 1]), answers([0] * 4, [0, 1, 0, 0])]
    given = iter(pair)
    monkeypatch.setattr(suite, "ask", lambda *_: next(given))
    monkeypatch.setattr(suite, "WaysLM", lambda *_: None)
    rows = suite.ask_ways(None, {"prototype_only": Way()}, dict.fromkeys("ab", ([], 4)))
    facts = [(row["task"], row.get("questions")) for row in rows]
    assert facts == [("name", 4), ("name", 4), ("mean", None)]
    assert [row["prototype_only"]["value"] for row in rows] == [0.5, 0.25, 0.375]
    halves = 1.959964 * np.array([25, 25, 25 / math.sqrt(2)])
    for row, value, half in zip(rows, (-25, 25, 0), halves, strict=True):
        points = row["prototype_only"]["points"]
        assert (points.value, points.low, points.high) == pytest.approx(
            (value, value - half, value + half)
        )
