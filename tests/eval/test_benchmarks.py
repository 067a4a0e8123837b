from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars, enable_progress_bars
from lm_eval.tasks import TaskManager

from prismlm.errors import FormatError, InputError
from prismlm.eval.benchmarks import SEED, load_tasks, select_benchmarks
from tests.helpers.benchmark_rows import QUESTIONS, write_benchmarks, write_rows

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
    with pytest.raises(InputError, match=r"no piqa_valid\.parquet.*--tasks"):
        load_tasks(PIQA, tmp_path)
    row = QUESTIONS["piqa"][3][0]
    for rows, message in (
        ([{"question": row["question"], "label": 0}], "1 rows of the columns question, label: exp"),
        ([row, row | {"label": 2}], r"row 1 of .* has the label 2: .* 0 to 1"),
    ):
        write_rows(tmp_path, "piqa_valid", rows)
        with pytest.raises(FormatError, match=message):
            load_tasks(PIQA, tmp_path)
    write_benchmarks(tmp_path, "piqa")
    with pytest.raises(InputError, match=r"no piqa_train\.parquet, which the 2 examples"):
        load_tasks(PIQA, tmp_path, shots=2)


def test_an_unreachable_hub_is_reported():
    with pytest.raises(InputError, match=r"documents of piqa cannot be downloaded .*--data"):
        load_tasks(PIQA)
