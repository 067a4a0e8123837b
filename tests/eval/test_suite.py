import math
from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars, enable_progress_bars
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from prismlm.errors import FormatError, InputError
from prismlm.eval.predictors import open_predictors
from prismlm.eval.suite import (
    SEED,
    SuiteOptions,
    load_tasks,
    mean_figures,
    run_suite,
    select_benchmarks,
    select_questions,
    task_figures,
)
from tests.helpers.benchmark_rows import QUESTIONS, write_benchmarks, write_rows

TASKS = ("arc_easy", "piqa", "winogrande")
(PIQA,) = select_benchmarks("seed", ["piqa"])


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    disable_progress_bars()
    yield
    enable_progress_bars()


@pytest.fixture
def one_subject(monkeypatch):
    """Reduce MMLU to anatomy: 57 subjects would need 57 sets of rows."""
    every = TaskManager.all_subtasks.fget
    anatomy = property(lambda self: [name for name in every(self) if name == "mmlu_anatomy"])
    monkeypatch.setattr(TaskManager, "all_subtasks", anatomy)


def lm_evals_task(name, folder, documents, split, examples, shots):
    """Return the task as lm-eval ships it, with documents in the hub's form."""
    splits = {split: Dataset.from_list(documents), examples: Dataset.from_list(documents)}
    spec = {"task": name, "custom_dataset": lambda **_: DatasetDict(splits), "num_fewshot": shots}
    if not name.startswith("mmlu"):
        # It would read the validation split, if it has one, to take no examples from it.
        spec["validation_split"] = "validation" if split == "validation" else None
    path = Path(lm_eval.tasks.__file__).parent / folder
    manager = TaskManager(include_path=path, include_defaults=False)
    return manager.load({"group": "own", "task": [spec]})["tasks"][name]


def questions(task, shots):
    """Return each question's requests and target, and the metrics of each answer."""
    rows = []
    for document in task.task_docs:
        context = task.fewshot_context(document, shots)
        requests = task.construct_requests(doc=document, ctx=context, metadata=("x", 0, 1))
        target = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        numbers = range(len(requests))
        metrics = [
            task.process_results(document, [(-1.0 - (n != best), False) for n in numbers])
            for best in numbers
        ]
        rows.append(([request.args for request in requests], target, metrics))
    return rows


@pytest.mark.usefixtures("one_subject")
@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("benchmark", SEED, ids=lambda benchmark: benchmark.name)
def test_local_questions_equal_those_of_lm_eval(benchmark, shots, tmp_path):
    split, documents, _, rows = QUESTIONS[benchmark.name]
    data = write_benchmarks(tmp_path / "data", benchmark.name)
    write_rows(data, f"{benchmark.name}_{benchmark.examples}", rows)
    name = "mmlu_anatomy" if benchmark.name == "mmlu" else benchmark.name
    expected = lm_evals_task(name, benchmark.folder, documents, split, benchmark.examples, shots)
    expected.set_fewshot_seed(0)
    (task,) = load_tasks(benchmark, data, shots=shots)
    assert questions(task, shots) == questions(expected, shots)
    assert list(task.aggregation()) == list(expected.aggregation())
    # The labelled answers are the right ones: the comparison does not see if both are wrong.
    for (_, _, metrics), row in zip(questions(task, shots), rows, strict=True):
        accuracies = [answer["acc"] for answer in metrics]
        assert accuracies == [n == row["label"] for n in range(len(metrics))]


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        load_tasks(PIQA, tmp_path / "nowhere")
    row = QUESTIONS["piqa"][3][0]
    for rows, message in (
        ([{"question": row["question"], "label": 0}], "1 rows of the columns question, label: exp"),
        ([row, row | {"label": 2}], r"row 1 of .* has the label 2: .* 0 to 1"),
    ):
        write_rows(tmp_path, "piqa_valid", rows)
        with pytest.raises(FormatError, match=message):
            load_tasks(PIQA, tmp_path)


def test_an_unreachable_hub_is_reported():
    with pytest.raises(InputError, match=r"documents of piqa cannot be downloaded .*--data"):
        load_tasks(PIQA)


# -- a suite on one model


@pytest.fixture(scope="module")
def lm(tiny_model):
    return open_predictors(tiny_model, batch_size=3)


@pytest.fixture
def options(tmp_path):
    return SuiteOptions(data=write_benchmarks(tmp_path / "data", *TASKS))


def test_accuracies_equal_those_of_lm_evals_evaluator(lm, options, tmp_path):
    result = run_suite(lm, "tiny", tmp_path / "out", options, TASKS)
    assert [task["title"] for task in result["tasks"]] == ["ARC-Easy", "PIQA", "WinoGrande"]
    assert result["predictors"] == ["plain", "prototype_only", "residual_only"]
    tasks = [load_tasks(item, options.data)[0] for item in select_benchmarks("seed", TASKS)]
    for predictor in result["predictors"]:
        lm.predictor = predictor
        by_name = {task.task_name: task for task in tasks}
        expected = evaluate(lm, by_name, bootstrap_iters=0, log_samples=False)["results"]
        for task in result["tasks"]:
            for metric, figure in task["predictors"][predictor].items():
                assert figure["value"] == expected[task["task"]][f"{metric},none"]
    lm.predictor = "plain"


def test_other_options_another_model_and_damaged_answers_are_refused(
    lm, options, tmp_path, tiny_model
):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"no boolq_dev\.parquet"):
        run_suite(lm, "tiny", out, SuiteOptions(data=options.data, seed=3), ["boolq"])
    # Without an answer, the settings of that run bind nobody.
    run_suite(lm, "tiny", out, options, ["piqa"])
    with pytest.raises(InputError, match=r"other settings \(limit: None → 1\).*--out"):
        run_suite(lm, "tiny", out, SuiteOptions(data=options.data, limit=1), ["piqa"])
    other = open_predictors(tiny_model)
    other.model.get_input_embeddings().weight.data += 1
    with pytest.raises(InputError, match=r"other settings \(model: "):
        run_suite(other, "tiny", out, options, ["piqa"])
    for damaged in ('{"choices": []}', '{"choices": [0], "correct": [1]}', "[]"):
        (out / "tasks" / "piqa.json").write_text(damaged)
        with pytest.raises(FormatError, match=r"piqa\.json is not what a run writes"):
            run_suite(lm, "tiny", out, options, ["piqa"])


def test_a_limit_samples_questions_by_the_seed(options):
    rows = [{"question": f"number {n}", "choices": ["a", "b"], "label": n % 2} for n in range(50)]
    write_rows(options.data, "piqa_valid", rows)

    def sample(seed):
        options_of_seed = SuiteOptions(data=options.data, limit=9, seed=seed)
        questions, count = select_questions(PIQA, options_of_seed)
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
    figures = task_figures(answers([1, 1, 0, 1], [1, 0, 0, 1]))
    assert [figures[name] for name in ("questions", "of")] == [4, 9]
    assert figures["chance"] == pytest.approx((1 / 2 + 3 / 4) / 4)
    plain, prototypes = (figures["predictors"][n]["acc"] for n in ("plain", "prototype_only"))
    # s² of (1, 1, 0, 1) is 1/4 · 4/3 · 3/4 = 1/4.
    assert plain == {"value": 0.75, "stderr": pytest.approx(math.sqrt(0.25 / 4))}
    # Differences (0, −1, 0, 0) have s² = 1/4 too: the error of the change is 0.25 / 0.75.
    assert prototypes["value"] == 0.5
    assert prototypes["change"] == pytest.approx(-100 / 3)
    assert prototypes["change_stderr"] == pytest.approx(100 * 0.25 / 0.75)


def test_a_mean_over_tasks_by_hand():
    means = mean_figures(
        [
            task_figures(answers([1, 1, 0, 1], [1, 0, 0, 1])),
            task_figures(answers([1, 0, 0, 0], [1, 1, 0, 0])),
        ]
    )
    error = pytest.approx(math.sqrt(2 * 0.25**2) / 2)
    assert means["plain"] == {"value": 0.5, "stderr": error}
    assert (means["prototype_only"]["value"], means["prototype_only"]["change"]) == (0.5, 0)
    assert means["prototype_only"]["change_stderr"] / 200 == error


def test_no_right_answer_has_no_change_and_a_single_question_no_error():
    figures = task_figures(answers([0, 0, 0, 0], [1, 0, 0, 0]))
    assert math.isnan(figures["predictors"]["prototype_only"]["acc"]["change"])
    single = task_figures(answers([1], [0], choices=[4]))
    plain, prototypes = (single["predictors"][n]["acc"] for n in ("plain", "prototype_only"))
    assert (plain["value"], prototypes["change"]) == (1, -100)
    assert math.isnan(plain["stderr"])
    assert math.isnan(prototypes["change_stderr"])
    assert math.isnan(mean_figures([single])["prototype_only"]["change_stderr"])
