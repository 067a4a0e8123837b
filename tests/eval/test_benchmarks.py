from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars, enable_progress_bars
from lm_eval.tasks import TaskManager

from prismlm.errors import FormatError, InputError
from prismlm.eval.benchmarks import SEED, benchmarks_of, load_tasks
from tests.helpers.benchmark_rows import QUESTIONS, write_benchmarks, write_rows


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    disable_progress_bars()
    yield
    enable_progress_bars()


@pytest.fixture
def one_subject(monkeypatch):
    """MMLU of anatomy alone: 57 subjects would need 57 sets of rows."""
    benchmark = benchmarks_of("seed", ["mmlu"])[0]._replace(name="mmlu_anatomy")
    every = TaskManager.all_subtasks.fget
    monkeypatch.setattr(
        TaskManager,
        "all_subtasks",
        property(lambda self: [name for name in every(self) if name == "mmlu_anatomy"]),
    )
    return benchmark._replace(name="mmlu")


def of_lm_eval(name, folder, documents, split, examples, shots):
    """The task as lm-eval ships it; only its dataset is not fetched but given in the hub's form."""
    place = Path(lm_eval.tasks.__file__).parent / folder
    found = {split: Dataset.from_list(documents), examples: Dataset.from_list(documents)}
    spec = {"task": name, "custom_dataset": lambda **_: DatasetDict(found), "num_fewshot": shots}
    if not name.startswith("mmlu"):
        # It would read the validation split, if it has one, to take no examples from it.
        spec["validation_split"] = "validation" if split == "validation" else None
    manager = TaskManager(include_path=place, include_defaults=False)
    return manager.load({"group": "own", "task": [spec]})["tasks"][name]


def asked(task, shots):
    found = []
    for document in task.task_docs:
        context = task.fewshot_context(document, shots)
        requests = task.construct_requests(doc=document, ctx=context, metadata=("x", 0, 1))
        target = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        judged = [
            task.process_results(
                document, [(-1.0 - (n != best), False) for n in range(len(requests))]
            )
            for best in range(len(requests))
        ]
        found.append(([request.args for request in requests], target, judged))
    return found


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("benchmark", SEED, ids=lambda benchmark: benchmark.name)
def test_local_questions_are_those_of_lm_eval(benchmark, shots, tmp_path, one_subject):
    if benchmark.name == "mmlu":
        benchmark = one_subject
    split, of_hub, _, rows = QUESTIONS[benchmark.name]
    data = write_benchmarks(tmp_path / "data", benchmark.name)
    write_rows(data, f"{benchmark.name}_{benchmark.examples}", rows)
    name = "mmlu_anatomy" if benchmark.name == "mmlu" else benchmark.name
    own = of_lm_eval(name, benchmark.folder, of_hub, split, benchmark.examples, shots)
    own.set_fewshot_seed(0)
    (local,) = load_tasks(benchmark, data, shots=shots)
    assert asked(local, shots) == asked(own, shots)
    assert list(local.aggregation()) == list(own.aggregation())
    # The answers that are said to be right are: the comparison would not see both wrong.
    for (pairs, _, judged), row in zip(asked(local, shots), rows, strict=True):
        assert [found["acc"] for found in judged] == [n == row["label"] for n in range(len(pairs))]


def test_files_that_cannot_be_used_are_refused(tmp_path):
    (piqa,) = benchmarks_of("seed", ["piqa"])
    with pytest.raises(InputError, match="is not a directory"):
        load_tasks(piqa, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no piqa_valid\.parquet.*--tasks"):
        load_tasks(piqa, tmp_path)
    row = QUESTIONS["piqa"][3][0]
    write_rows(tmp_path, "piqa_valid", [{"question": row["question"], "label": 0}])
    with pytest.raises(FormatError, match="1 rows of the columns question, label: expected"):
        load_tasks(piqa, tmp_path)
    write_rows(tmp_path, "piqa_valid", [row, row | {"label": 2}])
    with pytest.raises(FormatError, match=r"row 1 of .* has the label 2: .* 0 to 1"):
        load_tasks(piqa, tmp_path)
    write_benchmarks(tmp_path, "piqa")
    with pytest.raises(InputError, match=r"no piqa_train\.parquet, which the 2 examples"):
        load_tasks(piqa, tmp_path, shots=2)


def test_a_hub_that_cannot_be_reached_is_said():
    with pytest.raises(
        InputError, match=r"documents of piqa cannot be downloaded from the hub.*--data"
    ):
        load_tasks(benchmarks_of("seed", ["piqa"])[0])
