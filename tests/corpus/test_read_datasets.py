"""Hugging Face datasets, from local copies: no test needs a network."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns, HubDataset, build_corpus
from prismlm.errors import InputError

ROWS = [
    {"body": f"Document {i} says {i * i}.", "licence": "CC0" if i % 2 else None} for i in range(40)
]
COLUMNS = Columns(text="body", license="licence")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("folder") / "numbers"
    directory.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), directory / "train.parquet", row_group_size=8)
    return directory


def texts(corpus):
    return [corpus.text(i) for i in range(len(corpus))]


def test_a_folder_of_parquet_is_streamed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets.Dataset, "from_parquet", lambda *_, **__: pytest.fail("read as a whole")
    )
    corpus = build_corpus(
        HubDataset(str(folder)), tmp_path / "corpus", vocab_size=300, columns=COLUMNS
    )
    assert texts(corpus) == [row["body"] for row in ROWS]
    assert corpus.column("license") == [row["licence"] for row in ROWS]
    assert corpus.doc_ids[:2] == ["numbers:1", "numbers:2"]
    assert set(corpus.column("source")) == {"numbers"}


def test_a_dataset_saved_to_disk(tmp_path):
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(saved))
    found = HubDataset(str(saved), split="test")
    corpus = build_corpus(found, tmp_path / "corpus", vocab_size=300, columns=COLUMNS)
    assert texts(corpus) == [row["body"] for row in ROWS]


def test_files_are_relative_to_a_directory(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    found = HubDataset(folder.name, data_files=("train.parquet",))
    corpus = build_corpus(found, tmp_path / "corpus", vocab_size=300, columns=COLUMNS)
    assert texts(corpus) == [row["body"] for row in ROWS]
    assert corpus.meta["read"]["dataset"]["data_files"] == ["train.parquet"]
    for name, files in (("no-one/nothing", ["a"]), ("json", [str(folder.parent / "a")])):
        described = HubDataset(name, data_files=("a",)).described()
        assert described["dataset"]["data_files"] == files


@pytest.mark.parametrize(
    ("dataset", "columns", "words"),
    [
        (HubDataset("{folder}", split="tset"), COLUMNS, "'tset'"),
        (HubDataset("{folder}", "no-such"), COLUMNS, "no-such"),
        (HubDataset("{folder}/nothing"), COLUMNS, "cannot be read"),
        (HubDataset(__file__), COLUMNS, "is a file"),
        (HubDataset("{folder}"), Columns(text="text"), "the columns are: body, licence"),
    ],
)
def test_what_cannot_be_read(folder, tmp_path, dataset, columns, words):
    name = dataset.name.format(folder=folder)
    wrong = HubDataset(name, dataset.config, dataset.split)
    with pytest.raises(InputError, match=words):
        build_corpus(wrong, tmp_path / "corpus", vocab_size=300, columns=columns)
    assert not (tmp_path / "corpus").exists()


def test_names_with_a_configuration(folder):
    assert HubDataset.parse("wiki:en", "test") == HubDataset("wiki", "en", "test")
    assert HubDataset.parse("wiki") == HubDataset("wiki", None, "train")
    assert HubDataset.parse(str(folder)) == HubDataset(str(folder))
    assert str(HubDataset("wiki", "en")) == "wiki:en"
