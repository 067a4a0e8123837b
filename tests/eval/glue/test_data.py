import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.glue.data import TASKS, read_split
from tests.helpers.glue_rows import write_rows

BY_NAME = {task.name: task for task in TASKS}
PAIR = {"sentence1": "a", "sentence2": "b"}
# Rows as the files and the hub hold them: text, label, and the number that it means.
LAYOUTS = {
    "cola": [({"sentence": "a", "id": "train-0"}, 1, 1)],
    "sst2": [({"sentence": "a"}, 0, 0)],
    "mrpc": [(PAIR | {"id": "1-2"}, 1, 1)],
    "stsb": [(PAIR, 3.8, 3.8)],
    "rte": [(PAIR, "not_entailment", 1), (PAIR, 1, 1)],
    "wnli": [(PAIR, 1, 1)],
    "qqp": [({"question1": "a", "question2": "b"}, "1", 1)],
    "qnli": [({"question": "a", "sentence": "b"}, "entailment", 0)],
    "mnli": [({"premise": "a", "hypothesis": "b"}, "contradiction", 2)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(tmp_path, name):
    for text, label, number in LAYOUTS[name]:
        write_rows(tmp_path, f"{name}_train_subset", [text | {"label": label}])
        rows = read_split(BY_NAME[name], "train", tmp_path)
        assert rows.texts == [("a", "b")[: len(BY_NAME[name].columns)]]
        assert rows.labels == [number]
        assert rows.where == f"{name}_train_subset.parquet"


def test_the_dev_set_of_cola_is_of_two_files(tmp_path):
    rows = [{"sentence": "a", "label": 1, "id": "x"}]
    write_rows(tmp_path, "cola_dev", rows * 527)
    with pytest.raises(InputError, match=r"has no cola_dev_ood\.parquet, which CoLA needs"):
        read_split(BY_NAME["cola"], "dev", tmp_path)
    write_rows(tmp_path, "cola_dev_ood", [{"label": 0, "sentence": "b"}] * 516)
    found = read_split(BY_NAME["cola"], "dev", tmp_path)
    assert len(found.texts) == 1043
    assert sum(found.labels) == 527
    assert found.where == "cola_dev.parquet and cola_dev_ood.parquet"


def test_a_whole_set_goes_before_a_share_of_it(tmp_path):
    write_rows(tmp_path, "wnli_dev", [PAIR | {"label": 1}] * 71)
    write_rows(tmp_path, "wnli_dev_subset", [PAIR | {"label": 1}])
    assert len(read_split(BY_NAME["wnli"], "dev", tmp_path).texts) == 71


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("rte", "neutral", "entailment or not_entailment"),
        ("sst2", 2, "number from 0 to 1"),
        ("sst2", True, "has the label True"),
        ("mnli", 3, "number from 0 to 2"),
        ("stsb", 5.5, "STS-B has 0 to 5"),
        ("qqp", None, "has the label None"),
    ],
)
def test_a_label_that_is_none_of_the_task_s_is_named(tmp_path, name, label, words):
    (text, _, _), *_ = LAYOUTS[name]
    write_rows(tmp_path, f"{name}_dev_subset", [text | {"label": label}])
    with pytest.raises(FormatError, match=rf"row 0 of {name}_dev_subset\.parquet") as refused:
        read_split(BY_NAME[name], "dev", tmp_path)
    assert words in str(refused.value)


def test_what_is_missing_or_damaged_is_named(tmp_path):
    rte = BY_NAME["rte"]
    with pytest.raises(InputError, match="is not a directory"):
        read_split(rte, "train", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no rte_train\.parquet, which RTE needs, nor"):
        read_split(rte, "train", tmp_path)
    assert read_split(rte, "test", tmp_path) is None
    (tmp_path / "rte_train.parquet").write_text("not Parquet")
    with pytest.raises(FormatError, match=r"rte_train\.parquet cannot be read as Parquet"):
        read_split(rte, "train", tmp_path)
    for row, message in (
        ({"sentence1": "a", "label": 1}, "columns sentence1, label"),
        (PAIR, "has no labels"),
        ({"sentence1": "a", "sentence2": None, "label": 1}, "expected text"),
    ):
        write_rows(tmp_path, "rte_dev_subset", [row])
        with pytest.raises(FormatError, match=message):
            read_split(rte, "dev", tmp_path)


def test_labels_of_a_test_set_may_be_hidden(tmp_path):
    for rows in ([PAIR], [PAIR | {"label": -1}]):
        write_rows(tmp_path, "mrpc_test_subset", rows)
        assert read_split(BY_NAME["mrpc"], "test", tmp_path).labels is None
    write_rows(tmp_path, "mrpc_test_subset", [PAIR | {"label": 1}])
    assert read_split(BY_NAME["mrpc"], "test", tmp_path).labels == [1]
