import socket
import time
from dataclasses import replace
from pathlib import Path

import lm_eval.tasks
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars, enable_progress_bars
from huggingface_hub import constants
from lm_eval.tasks import TaskManager

from prismlm import hub
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
    benchmark = replace(benchmarks_of("seed", ["mmlu"])[0], name="mmlu_anatomy")
    every = TaskManager.all_subtasks.fget
    monkeypatch.setattr(
        TaskManager,
        "all_subtasks",
        property(lambda self: [name for name in every(self) if name == "mmlu_anatomy"]),
    )
    return replace(benchmark, name="mmlu")


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
    if benchmark.subjects:
        benchmark = one_subject
    split, of_hub, _, rows = QUESTIONS[benchmark.name]
    data = write_benchmarks(tmp_path / "data", benchmark.name)
    write_rows(data, f"{benchmark.name}_{benchmark.examples}", rows)
    name = "mmlu_anatomy" if benchmark.subjects else benchmark.name
    own = of_lm_eval(name, benchmark.folder, of_hub, split, benchmark.examples, shots)
    own.set_fewshot_seed(0)
    (local,) = load_tasks(benchmark, data, shots=shots)
    assert asked(local, shots) == asked(own, shots)
    assert list(local.aggregation()) == list(own.aggregation())
    # The answers that are said to be right are: the comparison would not see both wrong.
    for (pairs, _, judged), row in zip(asked(local, shots), rows, strict=True):
        assert [found["acc"] for found in judged] == [n == row["label"] for n in range(len(pairs))]


def test_hellaswag_by_hand(tmp_path):
    data = write_benchmarks(tmp_path / "data", "hellaswag")
    (task,) = load_tasks(benchmarks_of("seed", ["hellaswag"])[0], data)
    queries = [task.fewshot_context(document, 0) for document in task.task_docs]
    assert queries == [
        "Clean and jerk: A lady walks to a barbell. She bends down and grabs the pole. The lady",
        "Home and Garden: How to fold a shirt. Lay it flat. Face it down.",
    ]


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match=r"'hellaswagg'.*Did you mean 'hellaswag'"):
        benchmarks_of("seed", ["hellaswagg"])
    with pytest.raises(InputError, match="suite is 'glue': expected 'seed'"):
        benchmarks_of("glue")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    (piqa,) = benchmarks_of("seed", ["piqa"])
    with pytest.raises(InputError, match="is not a directory"):
        load_tasks(piqa, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no piqa_valid\.parquet.*--tasks"):
        load_tasks(piqa, tmp_path)
    (tmp_path / "piqa_valid.parquet").write_text("not Parquet")
    with pytest.raises(FormatError, match="cannot be read as Parquet"):
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
    with pytest.raises(InputError, match=r"documents of piqa cannot be had from the hub.*--data"):
        load_tasks(benchmarks_of("seed", ["piqa"])[0])


def test_a_hub_that_never_answers_is_given_up_within_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "SECONDS", 0.3)
        began = time.monotonic()
        with pytest.raises(InputError, match=address):
            load_tasks(benchmarks_of("seed", ["piqa"])[0])
        assert time.monotonic() - began < 5
        assert not constants.HF_HUB_OFFLINE
