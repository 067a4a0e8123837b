import math

import pytest
from lm_eval.evaluator import evaluate

from prismlm.errors import FormatError, InputError
from prismlm.eval.benchmarks import benchmarks_of, load_tasks
from prismlm.eval.predictors import open_predictors
from prismlm.eval.suite import (
    SuiteOptions,
    mean_figures,
    questions_of,
    run_suite,
    task_figures,
)
from tests.helpers.benchmark_rows import QUESTIONS, write_benchmarks, write_rows

TASKS = ("arc_easy", "piqa", "winogrande")


@pytest.fixture(scope="module")
def lm(tiny_model):
    return open_predictors(tiny_model, batch_size=3)


@pytest.fixture
def options(tmp_path):
    return SuiteOptions(data=write_benchmarks(tmp_path / "data", *TASKS))


def test_accuracies_are_those_of_lm_eval_s_evaluator(lm, options, tmp_path):
    found = run_suite(lm, "tiny", tmp_path / "out", options, TASKS)
    assert [task["title"] for task in found["tasks"]] == ["ARC-Easy", "PIQA", "WinoGrande"]
    assert found["predictors"] == ["plain", "prototype_only", "residual_only"]
    tasks = [load_tasks(item, options.data)[0] for item in benchmarks_of("seed", TASKS)]
    for predictor in found["predictors"]:
        lm.predictor = predictor
        by_name = {task.task_name: task for task in tasks}
        own = evaluate(lm, by_name, bootstrap_iters=0, log_samples=False)
        for task in found["tasks"]:
            for metric, figure in task["predictors"][predictor].items():
                assert figure["value"] == own["results"][task["task"]][f"{metric},none"]
    lm.predictor = "plain"


def test_other_options_and_another_model_are_refused(lm, options, tmp_path, tiny_model):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"no boolq_dev\.parquet"):
        run_suite(lm, "tiny", out, SuiteOptions(data=options.data, seed=3), ["boolq"])
    # It got no answer, so that nothing was begun.
    run_suite(lm, "tiny", out, options, ["piqa"])
    with pytest.raises(InputError, match=r"other settings \(limit: None → 1\).*--out"):
        run_suite(lm, "tiny", out, SuiteOptions(data=options.data, limit=1), ["piqa"])
    other = open_predictors(tiny_model)
    other.model.get_input_embeddings().weight.data += 1
    with pytest.raises(InputError, match=r"other settings \(model: "):
        run_suite(other, "tiny", out, options, ["piqa"])


@pytest.mark.parametrize("answers", ['{"gold": []}', '{"gold": [0], "correct": [1]}', "[]"])
def test_damaged_answers_are_named(answers, lm, options, tmp_path):
    out = tmp_path / "out"
    run_suite(lm, "tiny", out, options, ["piqa"])
    (out / "tasks" / "piqa.json").write_text(answers)
    with pytest.raises(FormatError, match=r"piqa\.json is not what a run writes"):
        run_suite(lm, "tiny", out, options, ["piqa"])


@pytest.mark.parametrize("name", ["arc_easy", "piqa", "winogrande"])
def test_a_label_outside_of_the_choices_is_refused(name, options, monkeypatch):
    *_, rows = QUESTIONS[name]
    # As the hub may have them: files are checked when they are read.
    given = [rows[0], rows[0] | {"label": 5}]
    monkeypatch.setattr("prismlm.eval.benchmarks._rows", lambda path, benchmark: given)
    with pytest.raises(FormatError, match=r"question 1 of .* label is none of them"):
        questions_of(*benchmarks_of("seed", [name]), options)


def test_a_limit_draws_by_its_seed(options):
    rows = [
        {"question": f"number {n}", "choices": ["one", "other"], "label": n % 2} for n in range(50)
    ]
    write_rows(options.data, "piqa_valid", rows)
    (piqa,) = benchmarks_of("seed", ["piqa"])

    def drawn(seed):
        found, of = questions_of(piqa, SuiteOptions(data=options.data, limit=9, seed=seed))
        assert of == 50
        for question in found:
            assert question.pairs[0] == (f"Question: number {question.number}\nAnswer:", " one")
            assert question.gold == question.number % 2
        return [question.number for question in found]

    first = drawn(0)
    assert len(set(first)) == 9
    assert first == sorted(first) == drawn(0) != drawn(1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"limit": -1}, "limit is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"shots": -1}, "shots is -1"),
        ({"suite": "sed"}, "the suite"),
    ],
)
def test_options_out_of_range_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        SuiteOptions(**given)


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
    assert math.isnan(found["predictors"]["prototype_only"]["acc"]["change"])
    single = task_figures(answers([1], [0], gold=[1], choices=[4]))
    predictors = single["predictors"]
    assert (predictors["plain"]["acc"]["value"], predictors["prototype_only"]["acc"]["change"]) == (
        1, -100,
    )  # fmt: skip
    assert math.isnan(predictors["plain"]["acc"]["stderr"])
    assert math.isnan(predictors["prototype_only"]["acc"]["change_stderr"])
    assert math.isnan(mean_figures([single])["prototype_only"]["change_stderr"])


def test_a_batch_of_nothing_is_refused_before_a_model_is_read(tmp_path):
    with pytest.raises(InputError, match="batch size is 0"):
        open_predictors(tmp_path, batch_size=0)
