"""Hugging Face datasets, from local copies: no test needs a network."""

from functools import partial

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns, HubDataset
from prismlm.errors import InputError
from tests.corpus.test_part import written
from tests.helpers.records import write_jsonl

# Every seventh is empty and left out.
ROWS = [
    {
        "body": f"Document {i} says {i * i}. " * (i % 7),
        "licence": "CC0" if i % 2 else None,
        "split": (None, "train", "validation")[i % 3],
    }
    for i in range(900)
]
KEPT = [row for row in ROWS if row["body"]]
COLUMNS = Columns(text="body", license="licence")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of three Parquet files."""
    directory = tmp_path_factory.mktemp("folder") / "numbers"
    directory.mkdir()
    for part in range(3):
        rows = pa.Table.from_pylist(ROWS[part * 300 : (part + 1) * 300])
        pq.write_table(rows, directory / f"train-{part}.parquet", row_group_size=17)
    return directory


@pytest.fixture
def build(build):
    return partial(build, columns=COLUMNS)


def texts(corpus):
    return [corpus.text(i) for i in range(len(corpus))]


def test_a_folder_of_parquet_is_streamed_and_its_parts_are_files(folder, build, monkeypatch):
    monkeypatch.setattr(
        datasets.Dataset, "from_parquet", lambda *_, **__: pytest.fail("read as a whole")
    )
    dataset = HubDataset(str(folder))
    files, one, five = (build(str(n), inputs=dataset, parts=n) for n in (None, 1, 5))
    assert len(files.meta["shards"]) == 3
    assert files.doc_ids[:2] == ["numbers:1:2", "numbers:1:3"]
    assert texts(files) == [row["body"] for row in KEPT]
    assert files.column("license") == [row["licence"] for row in KEPT]
    assert set(files.column("source")) == {"numbers"}
    assert written(files) == written(one) == written(five)


def test_a_dataset_saved_to_disk(build, tmp_path):
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS[:40])}).save_to_disk(str(saved))
    dataset = HubDataset(str(saved), split="test")
    one, three = (build(str(n), inputs=dataset, parts=n) for n in (1, 3))
    assert texts(one) == [row["body"] for row in ROWS[:40] if row["body"]]
    assert one.doc_ids[:2] == ["saved:2", "saved:3"]
    assert written(one) == written(three)


def test_data_files(folder, build, tmp_path, monkeypatch):
    for part in range(2):
        write_jsonl(tmp_path / f"part-{part}.jsonl", ROWS[part * 50 : part * 50 + 50])
    every = build(inputs=HubDataset("json", data_files=(str(tmp_path / "part-*.jsonl"),)))
    assert texts(every) == [row["body"] for row in ROWS[:100] if row["body"]]
    path = str(tmp_path / "part-1.jsonl")
    one = build("one", inputs=HubDataset("json", data_files=(path,)))
    assert one.doc_ids[0] == "part-1:1"
    assert one.meta["read"]["dataset"]["data_files"] == [path]
    # Relative to a directory of data files.
    monkeypatch.chdir(folder.parent)
    dataset = HubDataset(folder.name, data_files=("train-1.parquet",))
    relative = build("relative", inputs=dataset)
    assert texts(relative) == [row["body"] for row in ROWS[300:600] if row["body"]]
    assert relative.meta["read"]["dataset"]["data_files"] == ["train-1.parquet"]


@pytest.mark.parametrize(
    ("name", "split", "columns", "words"),
    [
        ("", "tset", COLUMNS, "'tset'"),
        ("nothing", "train", COLUMNS, "cannot be read"),
        ("", "train", Columns(text="text"), "the columns are: body, licence"),
    ],
)
def test_what_cannot_be_read(folder, build, tmp_path, name, split, columns, words):
    dataset = HubDataset(str(folder / name), split=split)
    for skip in (False, True):  # a missing column is no fault of a row
        with pytest.raises(InputError, match=words) as caught:
            build(inputs=dataset, columns=columns, skip_bad_rows=skip)
        assert "Fix the row" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_with_a_configuration(folder):
    assert HubDataset.parse("wiki:en", "test") == HubDataset("wiki", "en", "test")
    assert HubDataset.parse("wiki") == HubDataset("wiki", None, "train")
    assert HubDataset.parse(str(folder)) == HubDataset(str(folder))
