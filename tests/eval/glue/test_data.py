import pytest

from prismlm.errors import FormatError, InputError
from prismlm.eval.glue.data import TASKS, read_split
from tests.helpers.glue_rows import write_rows

BY_NAME = {task.name: task for task in TASKS}
PAIR = {"sentence1": "a", "sentence2": "b"}
# Rows as the files and the hub have them: text, label, and the label's number.
LAYOUTS = [
    ("cola", {"sentence": "a", "id": "train-0"}, 1, 1),
    ("sst2", {"sentence": "a"}, 0, 0),
    ("mrpc", PAIR | {"id": "1-2"}, 1, 1),
    ("stsb", PAIR, 3.8, 3.8),
    ("rte", PAIR, "not_entailment", 1),
    ("rte", PAIR, 1, 1),
    ("wnli", PAIR, 1, 1),
    ("qqp", {"question1": "a", "question2": "b"}, "1", 1),
    ("qnli", {"question": "a", "sentence": "b"}, "entailment", 0),
    ("mnli", {"premise": "a", "hypothesis": "b"}, "contradiction", 2),
]


@pytest.mark.parametrize(("name", "text", "label", "number"), LAYOUTS)
def test_every_layout_is_read(tmp_path, name, text, label, number):
    write_rows(tmp_path, f"{name}_train_subset", [text | {"label": label}])
    texts, labels, source = read_split(BY_NAME[name], "train", tmp_path)
    assert texts == [("a", "b")[: len(BY_NAME[name].columns)]]
    assert labels.tolist() == [number]
    assert source == f"{name}_train_subset.parquet"


def test_the_dev_set_of_cola_consists_of_two_files(tmp_path):
    write_rows(tmp_path, "cola_dev", [{"sentence": "a", "label": 1, "id": "x"}] * 527)
    with pytest.raises(InputError, match=r"has no cola_dev_ood\.parquet, which CoLA needs"):
        read_split(BY_NAME["cola"], "dev", tmp_path)
    write_rows(tmp_path, "cola_dev_ood", [{"label": 0, "sentence": "b"}] * 516)
    texts, labels, source = read_split(BY_NAME["cola"], "dev", tmp_path)
    assert (len(texts), labels.sum()) == (1043, 527)
    assert source == "cola_dev.parquet and cola_dev_ood.parquet"


def test_a_complete_set_is_preferred_to_a_subset(tmp_path):
    write_rows(tmp_path, "wnli_dev", [PAIR | {"label": 1}] * 71)
    write_rows(tmp_path, "wnli_dev_subset", [PAIR | {"label": 1}])
    assert len(read_split(BY_NAME["wnli"], "dev", tmp_path).inputs) == 71


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("rte", "neutral", "entailment or not_entailment"),
        ("sst2", 2, "number from 0 to 1"),
        ("sst2", True, "has the label True"),
        ("stsb", 5.5, "STS-B has 0 to 5"),
        ("qqp", None, "has the label None"),
    ],
)
def test_an_unknown_label_is_refused(tmp_path, name, label, expected):
    text = next(text for task, text, *_ in LAYOUTS if task == name)
    write_rows(tmp_path, f"{name}_dev_subset", [text | {"label": label}])
    with pytest.raises(FormatError, match=rf"row 0 of {name}_dev_subset\.parquet.*{expected}"):
        read_split(BY_NAME[name], "dev", tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path):
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


@pytest.mark.parametrize(
    ("label", "labels"), [({}, None), ({"label": -1}, None), ({"label": 1}, [1])]
)
def test_labels_of_a_test_set_may_be_hidden(tmp_path, label, labels):
    write_rows(tmp_path, "mrpc_test_subset", [PAIR | label])
    assert read_split(BY_NAME["mrpc"], "test", tmp_path).labels == labels
