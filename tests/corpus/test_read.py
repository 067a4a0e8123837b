from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm import files
from prismlm.corpus import Columns, Document, DocumentReader, formats, read, read_documents
from prismlm.errors import InputError

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "text": "First – 🙂.", "source": "s", "domain": "d", "license": "l", "title": "t"},
    {"id": "b", "text": " Second\n", "url": "https://example.org"},
]
EXPECTED = [
    Document("a", "First – 🙂.", "s", "d", "l", "t", None),
    Document("b", " Second\n", "texts", None, None, None, "https://example.org"),
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def _parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def _zst(data: bytes, path: Path) -> Path:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data)
    return path


def _written(kind: str, directory: Path) -> Path:
    path = directory / f"texts.{kind}"
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES))
    elif kind.endswith(".zst"):
        _zst(LINES, path)
    elif kind == "json":
        path.write_text(json.dumps(RECORDS), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(
                file, ["id", "text", "source", "domain", "license", "title", "url"]
            )
            table.writeheader()
            table.writerows(RECORDS)
    elif kind == "parquet":
        names = ("id", "text", "source", "domain", "license", "title", "url")
        _parquet(path, {name: [record.get(name) for record in RECORDS] for name in names})
    else:
        path.write_bytes(LINES)
    return path


LINE_KINDS = [f"{kind}{packing}" for kind in ("jsonl", "ndjson") for packing in ("", ".gz", ".zst")]


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", *LINE_KINDS])
def test_every_format_gives_the_same_documents(kind: str, tmp_path: Path) -> None:
    reader = DocumentReader(_written(kind, tmp_path))
    assert list(reader) == EXPECTED
    assert list(reader) == EXPECTED, "a second pass reads the same"
    assert reader.done == reader.total


def test_text_files_of_a_directory_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.doc", ".hidden/d.txt", ".e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    found = list(read_documents(tmp_path))
    assert [document.doc_id for document in found] == ["a.txt", "b.txt", "sub/c.txt"]
    assert [document.source for document in found] == ["a", "b", "c"]
    assert found[2].text == "text of sub/c.txt"


def test_a_finished_corpus_below_the_inputs_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "corpus.json").write_text("{}", encoding="utf-8")
    _parquet(tmp_path / "out" / "text-00000.parquet", {"text": ["copy"]})
    assert [document.doc_id for document in read_documents(tmp_path)] == ["a.txt"]


def test_other_columns_numbers_and_missing_ids(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "t.parquet", {"body": ["x", "y"], "year": [1999, None]})
    found = list(read_documents(path, Columns(text="body", title="year")))
    assert [(d.doc_id, d.title) for d in found] == [("t.parquet:1", "1999"), ("t.parquet:2", None)]


def _refused(path: Path, columns: Columns | None = None) -> str:
    with pytest.raises(InputError) as caught:
        list(read_documents(path, columns))
    return str(caught.value)


def test_missing_text_column_lists_and_suggests(tmp_path: Path) -> None:
    table = _parquet(tmp_path / "t.parquet", {"texts": ["x"], "n": [1]})
    message = _refused(table)
    assert "n, texts" in message
    assert "'texts'" in message
    assert "--text-column" in message
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    assert f"{lines}:2" in _refused(lines)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_named_must_exist(kind: str, tmp_path: Path) -> None:
    message = _refused(_written(kind, tmp_path), Columns(id="key"))
    assert "'key'" in message
    assert "--id-column" in message


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("damage", ["cut", "other content", "empty"])
def test_damaged_files(kind: str, damage: str, tmp_path: Path) -> None:
    path = _written(kind, tmp_path)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-5], "other content": b"not packed\n" * 9, "empty": b""}[damage])
    message = _refused(path)
    if damage == "empty" and kind != "parquet":
        assert "No documents" in message
    else:
        assert f"{path} is damaged" in message


LONG = "a" * 10**5


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a text and of repeated text that are a hundredth of those of use."""
    assert (files.LARGEST_TEXT, formats.SMALL) == (2**27, 2**25)
    for module in (files, formats):
        monkeypatch.setattr(module, "LARGEST_TEXT", 2**20)
    monkeypatch.setattr(formats, "SMALL", 2**18)


def _bomb(kind: str, directory: Path) -> Path:
    """Write a file of a few kilobytes that unpacks to 4 MB, or to a single text of 1.4 MB."""
    path = directory / f"bomb.{kind.partition(' ')[0]}"
    text = LONG * 14 if kind.endswith("one text") else LONG
    line = f'{{"text": "{text}"}}\n'.encode()
    if path.suffix == ".gz":
        with gzip.open(path, "wb", 1) as file:
            file.write(line if "one" in kind else line * 40)
    elif path.suffix == ".zst":
        _zst(line if "one" in kind else line * 40, path)
    elif "rows" in kind:
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array([LONG]))
        pq.write_table(pa.table({"text": texts}), path, dictionary_pagesize_limit=2**30)
    else:
        pq.write_table(pa.table({"text": [LONG * 40]}), path, compression="zstd")
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("jsonl.gz", "unpacks to more than"),
        ("jsonl.zst one text", ":1 is larger than 1 MiB"),
        ("parquet", "unpacks to more than"),
        ("parquet rows of one text", "unpacks to more than"),
    ],
)
@pytest.mark.usefixtures("limits")
def test_what_unpacks_to_a_hundred_times_its_size_is_refused(
    kind: str, said: str, tmp_path: Path
) -> None:
    path = _bomb(kind, tmp_path)
    assert path.stat().st_size < 40_000
    assert f"{path}{'' if said.startswith(':') else ' '}{said}" in _refused(path)


@pytest.mark.usefixtures("limits")
def test_a_table_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_table_rows", lambda *_: pytest.fail("it was unpacked"))
    assert "unpacks to more than" in _refused(_bomb("parquet", tmp_path))


@pytest.mark.parametrize(("limit", "sizes"), [(30, [3]), (2, [1, 1, 1])])
def test_rows_that_may_be_large_are_read_few_at_once(
    limit: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at_once: list[int] = []
    rows = formats._table_rows

    def counted(batches: Iterable[pa.RecordBatch], *others: Any) -> Iterator[Any]:
        batches = list(batches)
        read_at_once.extend(batch.num_rows for batch in batches)
        return rows(batches, *others)

    monkeypatch.setattr(formats, "_table_rows", counted)
    monkeypatch.setattr(formats, "MAX_JSON", limit * len(LONG))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": [f"{LONG}{n}" for n in range(3)]}), path)
    assert len(list(read_documents(path))) == 3
    assert read_at_once == sizes


def test_the_rest_is_searched_for_bad_rows_no_longer_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": 1}\n' * 9)
    message = _refused(tmp_path / "t.jsonl")
    assert "9 rows cannot be used (text is a number: 9):" in message
    assert message.count("t.jsonl:") == 5
    monkeypatch.setattr(read, "SEARCH_SECONDS", 0.0)
    assert "2 rows cannot be used (text is a number: 2), in 0 s of reading:" in _refused(
        tmp_path / "t.jsonl"
    )


@pytest.mark.parametrize("kind", ["csv", "txt"])
@pytest.mark.usefixtures("limits")
def test_a_text_of_no_end_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{kind}"
    path.write_text(("text\n" if kind == "csv" else "") + LONG * 14)
    assert "larger than 1 MiB" in _refused(path)


def test_a_file_of_markdown_or_of_one_object_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Title", encoding="utf-8")
    (tmp_path / "one.json").write_text('{"text": "alone"}', encoding="utf-8")
    assert list(read_documents(tmp_path)) == [
        Document("notes.md", "# Title", "notes"),
        Document("one.json:1", "alone", "one"),
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.jsonl", '{"text": "a"}\n{"text": "b"', "t.jsonl:2 is not valid JSON"),
        ("t.jsonl", '{"text": "a"}\n[1, 2]', "one JSON object on each line"),
        ("t.jsonl", '{"text": 3}', "t.jsonl:1: the text is a number"),
        ("t.jsonl", '{"text": {"a": 1}}', "t.jsonl:1: the text is a record"),
        ("t.jsonl", '{"text": "a", "id": "\\ud800"}', "t.jsonl:1"),
        ("t.jsonl", '{"text": "a", "id": ' + "9" * 5000 + "}", "t.jsonl:1"),
        ("t.json", "[1]", "t.json:1 holds a JSON int"),
        ("t.json", '{"text": "a"} {', "is not valid JSON"),
        ("t.json", '[{"words": "a"}]', "there is no column 'text'"),
        ("t.csv", "words\na\n", "there is no column 'text'"),
        ("t.csv", "", "there is no column 'text'"),
        ("t.csv", 'text\n"a', "is not valid CSV"),
        ("t.csv", "id,text\na\n", "the text is a null"),
    ],
)
def test_rows_that_cannot_be_used(name: str, data: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(data, encoding="utf-8")
    assert message in _refused(tmp_path / name)


def test_a_file_is_read_once(tmp_path: Path) -> None:
    inner = tmp_path / "d" / "inner"
    inner.mkdir(parents=True)
    (inner / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "d" / "b.txt").hardlink_to(inner / "a.txt")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    (inner / "other").symlink_to(inner)
    (tmp_path / "c.txt").symlink_to(inner / "a.txt")
    named = [tmp_path / "d", tmp_path / "d" / "inner", tmp_path / "c.txt", inner / "a.txt"]
    reader = DocumentReader(named)
    assert [document.text for document in reader] == ["one"]
    assert (reader.duplicates, reader.total) == (4, 3)
    assert reader.manifest() == {
        "files": [{"name": "b.txt", "bytes": 3, "documents": 1}],
        "named_again": 4,
        "not_read": {},
    }


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.PDF", "c.docx", "LICENSE"):
        (tmp_path / name).write_bytes(b"x")
    assert "It has 1 .docx, 2 .pdf, 1 without extension" in _refused(tmp_path)
    _written("jsonl", tmp_path)
    reader = DocumentReader(tmp_path)
    list(reader)
    list(reader)
    (file,) = reader.manifest()["files"]
    assert (file["name"], file["documents"]) == ("texts.jsonl", 2)
    assert reader.manifest()["not_read"] == {".docx": 1, ".pdf": 2, "without extension": 1}


def test_a_link_to_nothing_is_named_where_it_would_be_read(tmp_path: Path) -> None:
    _written("jsonl", tmp_path)
    (tmp_path / "old.pdf").symlink_to(tmp_path / "nowhere.pdf")
    assert len(list(read_documents(tmp_path))) == 2
    (tmp_path / "old.txt").symlink_to(tmp_path / "nowhere.txt")
    assert "old.txt is a broken link" in _refused(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    assert "does not exist" in _refused(tmp_path / "absent.txt")
    assert "no file that can be read" in _refused(tmp_path)
    (tmp_path / "t.docx").write_bytes(b"x")
    assert "does not have a supported extension" in _refused(tmp_path / "t.docx")
    (tmp_path / "t.txt").write_text(" \n", encoding="utf-8")
    assert "No documents" in _refused(tmp_path)
    with pytest.raises(InputError, match="No input"):
        DocumentReader([])


def test_equal_names_in_two_directories_need_the_directory_above(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="name the directory above the files"):
        list(read_documents([tmp_path / "first", tmp_path / "second"]))
    assert [d.doc_id for d in read_documents(tmp_path)] == ["first/x.jsonl:1", "second/x.jsonl:1"]


def test_ids_are_the_text_that_was_written(tmp_path):
    ids = ["1503.00990", "7", "1e5", '"1503.009900"', "12.0"]
    rows = [f'{{"id": {id}, "text": "{n}"}}' for n, id in enumerate(ids)]
    expected = ["1503.00990", "7", "1E+5", "1503.009900", "12.0"]
    for name, whole in (("a.jsonl", "\n".join(rows)), ("a.json", f"[{','.join(rows)}]")):
        (tmp_path / name).write_text(whole)
        assert [document.doc_id for document in read_documents(tmp_path / name)] == expected
