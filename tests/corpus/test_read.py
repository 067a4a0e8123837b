"""Files, directories, stores and datasets as documents; bad rows, limits; the bundled sample."""

import gzip
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from prismlm import files
from prismlm.corpus import Columns, Document, DocumentReader, HubDataset, formats, sample_path
from prismlm.errors import InputError
from tests.corpus.test_part import written
from tests.helpers.records import write_jsonl

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "text": "First – 🙂.", "source": "s", "domain": "d", "license": "l", "title": "t"},
    {"id": "b", "text": " Second\n", "url": "https://example.org"},
]
NAMES = ("id", "text", "source", "domain", "license", "title", "url")
TABLE = pa.table({name: [row.get(name) for row in RECORDS] for name in NAMES})
EXPECTED = [
    Document("a", "First – 🙂.", "s", "d", "l", "t", None),
    Document("b", " Second\n", "texts", None, None, None, "https://example.org"),
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def write_packed(data, path):
    """Write a file that is compressed as its extension says."""
    with pa.output_stream(str(path)) as stream:
        stream.write(data)
    return path


def write_parquet(path, columns):
    pq.write_table(pa.table(columns), path)
    return path


def write_records(kind, directory):
    path = directory / f"texts.{kind}"
    if kind == "json":
        path.write_text(json.dumps(RECORDS), encoding="utf-8")
    elif kind == "csv":
        write_csv(TABLE, path)
    elif kind == "parquet":
        pq.write_table(TABLE, path)
    else:
        write_packed(LINES, path)
    return path


def error_of(path, columns=None):
    with pytest.raises(InputError) as caught:
        list(DocumentReader(path, columns))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "jsonl", "ndjson.gz", "jsonl.zst"])
def test_every_format_gives_the_same_documents(kind, tmp_path):
    reader = DocumentReader(write_records(kind, tmp_path))
    assert list(reader) == EXPECTED
    assert list(reader) == EXPECTED, "a second pass reads the same"
    assert reader.done == reader.total


def test_columns_with_other_names(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"body": ["x", "y"], "year": [1999, None]})
    documents = DocumentReader(path, Columns(text="body", title="year"))
    expected = [("t.parquet:1", "1999"), ("t.parquet:2", None)]
    assert [(document.doc_id, document.title) for document in documents] == expected
    message = error_of(path)
    assert "there is no column 'text'; the columns are: body, year." in message
    assert "--text-column" in message
    message = error_of(write_records("jsonl", tmp_path), Columns(id="title_"))
    assert "Did you mean 'title'? Rename the id column" in message


def test_ids_are_the_text_that_was_written(tmp_path):
    ids = ["1503.00990", "7", "1e5", '"1503.009900"', "12.0"]
    rows = [f'{{"id": {id}, "text": "{n}"}}' for n, id in enumerate(ids)]
    expected = ["1503.00990", "7", "1E+5", "1503.009900", "12.0"]
    for name, content in (("a.jsonl", "\n".join(rows)), ("a.json", f"[{','.join(rows)}]")):
        (tmp_path / name).write_text(content)
        assert [document.doc_id for document in DocumentReader(tmp_path / name)] == expected


def test_equal_names_in_two_directories_need_the_directory_above(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="name the directory above the files"):
        list(DocumentReader([tmp_path / "first", tmp_path / "second"]))
    assert [d.doc_id for d in DocumentReader(tmp_path)] == ["first/x.jsonl:1", "second/x.jsonl:1"]


def test_odd_but_valid_inputs_are_read_unchanged(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,NA\n2,"multi\nline ""q"", ok"\n3,\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"id": "[/red]<b>", "text": "\\u001b[31m<script>"}\n\n'
    )
    (tmp_path / "d.jsonl").write_text("")
    reader = DocumentReader(tmp_path)
    texts = ["NA", 'multi\nline "q", ok', "one\r\ntwo\r\n", "\x1b[31m<script>"]
    assert [document.text for document in reader] == texts
    assert reader.left_out == {"no text": 1}
    assert "No documents" in error_of(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.jsonl", '{"text": "a"}\n{"text": "b"', "t.jsonl:2 is not valid JSON"),
        ("t.jsonl", '{"text": "a"}\n{"body": "b"}\n', "t.jsonl:2: there is no column 'text'"),
        ("t.jsonl", '{"text": {"a": 1}}', "t.jsonl:1: the text is {'a': 1}, expected a string"),
        ("t.jsonl", '{"text": "a", "id": "\\ud800"}', "t.jsonl:1"),
        ("t.jsonl", '{"text": "a", "id": ' + "9" * 5000 + "}", "t.jsonl:1"),
        ("t.json", "[1]", "t.json:1 holds a JSON int"),
        ("t.json", '{"text": "a"} {', "is not valid JSON"),
        ("t.csv", "", "there is no column 'text'"),
        ("t.csv", "text,id,text\na,1,b\n", "t.csv: several columns are named 'text'"),
        ("t.csv", 'text\n"a', "t.csv cannot be read (unexpected end of data). If it is damaged"),
        ("t.csv", "id,text\na,Hello, world\n", "t.csv:1 has more values than the header"),
        ("t.csv", "text\nK\udce4se", "byte 0xe4 in position 6"),
        ("t.docx", "x", "does not have a supported extension"),
        ("t.txt", " \n", "No documents"),
    ],
)
def test_rows_and_files_that_cannot_be_used(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data.encode("utf-8", "surrogateescape"))
    assert message in error_of(tmp_path / name)


def test_inputs_without_files(tmp_path):
    assert "does not exist" in error_of(tmp_path / "absent.txt")
    (tmp_path / "a.pdf").write_bytes(b"x")
    assert "no file that can be read" in (message := error_of(tmp_path))
    assert "It has: .pdf: 1" in message
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    assert "saved is a saved dataset: `corpus build` takes it as --dataset" in error_of(tmp_path)


# Files with a good row and bad ones, and how many of these are left out for which reason.
BAD_FILES = {
    "a_cut.jsonl": (b'{"text": "cut off he', {"not valid JSON": 1}),
    "b_number.jsonl": (b'{"text": 12345}', {"text is not a string": 1}),
    "c_half.jsonl": (b'{"text": "ab\\ud83d"}', {"not valid Unicode": 1}),
    "d_twice.jsonl": (b'{"id": 7, "text": "a"}\n' * 3, {"id used before": 2}),
    "e_column.jsonl": (b'{"words": "x"}\n[1]', {"a column is missing": 1, "not a JSON object": 1}),
    "f_gbk.jsonl": ('{"text": "你好"}'.encode("gbk"), {"not UTF-8": 1}),
    "g_list.jsonl": (b'{"text": "a", "title": ["b"]}', {"column is not text or a number": 1}),
}


def test_the_first_bad_row_is_named_or_all_are_left_out_and_counted(build, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    reasons = {}
    for name, (bad, why) in BAD_FILES.items():
        (texts / name).write_bytes(b'{"text": "good"}\n' + bad)
        reasons |= why
    (texts / "h_gbk.txt").write_bytes("你好，世界。".encode("gbk"))
    write_parquet(texts / "i_binary.parquet", {"text": [b"bytes", b"more"]})
    with pytest.raises(InputError, match=r"a_cut\.jsonl:2 is not valid JSON(.*)--skip-bad-rows"):
        build(inputs=texts)
    assert not (tmp_path / "out").exists()
    built = build(inputs=texts, skip_bad_rows=True)
    assert built.meta["left_out"] == reasons | {"not UTF-8": 2, "text is not a string": 3}
    assert (built.meta["counts"]["skipped"], len(built)) == (12, 8)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("damage", ["cut", "other content", "empty"])
def test_damaged_files(kind, damage, tmp_path):
    path = write_records(kind, tmp_path)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-5], "other content": b"not packed\n" * 9, "empty": b""}[damage])
    valid = damage == "empty" and kind != "parquet"
    assert ("No documents" if valid else f"{path} cannot be read (") in error_of(path)


@pytest.mark.parametrize("kind", ["csv", "txt", "jsonl.zst"])
def test_a_text_above_the_limit_is_refused(kind, tmp_path, monkeypatch):
    assert files.LARGEST_TEXT == 2**27
    for module in (files, formats):
        monkeypatch.setattr(module, "LARGEST_TEXT", 2**20)
    text = ("text\n" if kind == "csv" else "") + "a" * 1_400_000
    path = write_packed(text.encode(), tmp_path / f"t.{kind}")
    assert "larger than 1 MiB" in error_of(path)


# A directory with hidden files, a corpus, and files that cannot be read.
FILES = {
    "b.txt": b"text of b",
    "a.md": b"text of a",
    "sub/c.txt": b"text of c",
    "sub/d.jsonl.gz": gzip.compress(b'{"text": "d"}\n'),
    "one.json": b'{"text": "alone"}',
    "f.csv": b'text,id\n"x, y",f\n',
    **dict.fromkeys(("n.pdf", "N.PDF", "LICENSE", ".e.txt", ".hidden/d.txt"), b"not this"),
    **dict.fromkeys((".cache/dataset_dict.json", "out/corpus.json", "out/in/f.txt"), b"{}"),
}
DOCUMENTS = [
    Document("a.md", "text of a", "a"),
    Document("b.txt", "text of b", "b"),
    Document("f", "x, y", "f"),
    Document("one.json:1", "alone", "one"),
    Document("sub/c.txt", "text of c", "c"),
    Document("sub/d.jsonl.gz:1", "d", "d"),
    Document("one", "c1", "table"),
]


def test_a_directory_is_read_in_sorted_order_without_hidden_files_and_corpora(
    tmp_path, store, monkeypatch
):
    local = tmp_path / "local"
    for name, data in FILES.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(data)
    write_parquet(local / "table.parquet", {"text": ["c1"], "id": ["one"]})
    remote = store(local)
    listing = remote.fs.ls
    # What is linked or named again is read once.
    (local / "sub" / "loop").symlink_to(local)
    (local / "sub" / "e.txt").symlink_to(local / "b.txt")

    def marked(_, path, detail=True, **options):
        # In a store, an empty file may mark a directory.
        return [{"name": path, "size": 0, "type": "file"}, *listing(path, detail=detail, **options)]

    monkeypatch.setattr(type(remote.fs), "ls", marked)
    # Typer's paths have lost a slash.
    addresses = str(remote), str(remote).replace("//", "/"), remote, Path(f"file://{local}")
    for inputs in ([local, local / "a.md"], *addresses):
        reader = DocumentReader(inputs)
        assert list(reader) == DOCUMENTS
        assert [(file.name, file.size) for file in reader.files][:2] == [("a.md", 9), ("b.txt", 9)]
        assert reader.ignored == {".pdf": 2, "without extension": 1}
    both = DocumentReader([str(remote / "table.parquet"), local / "f.csv"])
    assert [document.doc_id for document in both] == ["one", "f"]
    (local / "old.txt").symlink_to(local / "nowhere.txt")
    assert "old.txt cannot be read" in error_of(local)


def test_stores_that_cannot_be_read(monkeypatch):
    pytest.importorskip("upath")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    missing = {"nowhere://bucket": r"prismlm\[remote\]", "gs://bucket/texts": "install gcsfs"}
    for address, match in missing.items():
        with pytest.raises(InputError, match=f"{address} cannot be read .*{match}"):
            DocumentReader(address)


ALLOWED = (
    *("CC-BY-4.0", "CC-BY-4.0 (code MIT)", "CC0 (arXiv metadata)", "CC0-1.0", "public-domain/CC0"),
    *("public-domain", "public-domain-US-gov", "public-domain-US-gov/CC0"),
    "text public-domain (Gutenberg)",
)
# How the sources of each section of ATTRIBUTION.md begin, in its order.
SOURCES = (
    *("openstax/", "arxiv/", "classic-books/", "fairytaleqa/", "legal_au_fca", "medquad/", "fed/"),
    *("digital.gov", "18f-blog", "python-peps", "ethereum-eips", "cpp-docs", "powershell-docs"),
)


def test_the_sample_is_small_varied_openly_licensed_and_credited():
    sizes, taken = Counter[str](), Counter[str]()
    for document in DocumentReader(sample_path()):
        assert document.domain is not None
        assert document.license in ALLOWED
        sizes[document.domain] += len(document.text.encode())
        taken[next(one for one in SOURCES if str(document.source).startswith(one))] += 1
    assert len(sizes) >= 8
    assert 10e6 < sizes.total() < 20e6
    assert min(sizes.values()) > 0.8 * max(sizes.values())
    assert sample_path().stat().st_size <= 6_000_000
    assert pq.read_schema(sample_path()).names == [
        *("id", "text", "domain", "source", "license", "title", "url", "split")
    ]
    credits = (sample_path().parent / "ATTRIBUTION.md").read_text(encoding="utf-8")
    counts = re.findall(r"^- Taken: ([\d,]+) texts", credits, re.MULTILINE)
    assert counts == [f"{taken[source]:,}" for source in SOURCES]
    assert f"holds {taken.total():,} texts" in credits


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
def stream(build):
    return partial(build, columns=COLUMNS)


def texts(corpus):
    return [corpus.text(i) for i in range(len(corpus))]


def test_a_folder_of_parquet_is_streamed_and_its_parts_are_files(folder, stream, monkeypatch):
    monkeypatch.setattr(
        datasets.Dataset, "from_parquet", lambda *_, **__: pytest.fail("read as a whole")
    )
    dataset = HubDataset(str(folder))
    files, one, five = (stream(str(n), inputs=dataset, parts=n) for n in (None, 1, 5))
    assert len(files.meta["shards"]) == 3
    assert files.doc_ids[:2] == ["numbers:1:2", "numbers:1:3"]
    assert texts(files) == [row["body"] for row in KEPT]
    assert files.column("license") == [row["licence"] for row in KEPT]
    assert set(files.column("source")) == {"numbers"}
    assert written(files) == written(one) == written(five)


def test_a_dataset_saved_to_disk(stream, tmp_path):
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS[:40])}).save_to_disk(str(saved))
    dataset = HubDataset(str(saved), split="test")
    one, three = (stream(str(n), inputs=dataset, parts=n) for n in (1, 3))
    assert texts(one) == [row["body"] for row in ROWS[:40] if row["body"]]
    assert one.doc_ids[:2] == ["saved:2", "saved:3"]
    assert written(one) == written(three)


def test_data_files(folder, stream, tmp_path, monkeypatch):
    for part in range(2):
        write_jsonl(tmp_path / f"part-{part}.jsonl", ROWS[part * 50 : part * 50 + 50])
    every = stream(inputs=HubDataset("json", data_files=(str(tmp_path / "part-*.jsonl"),)))
    assert texts(every) == [row["body"] for row in ROWS[:100] if row["body"]]
    path = str(tmp_path / "part-1.jsonl")
    one = stream("one", inputs=HubDataset("json", data_files=(path,)))
    assert one.doc_ids[0] == "part-1:1"
    assert one.meta["read"]["dataset"]["data_files"] == [path]
    # Relative to a directory of data files.
    monkeypatch.chdir(folder.parent)
    dataset = HubDataset(folder.name, data_files=("train-1.parquet",))
    relative = stream("relative", inputs=dataset)
    assert texts(relative) == [row["body"] for row in ROWS[300:600] if row["body"]]
    assert relative.meta["read"]["dataset"]["data_files"] == ["train-1.parquet"]
    # Without files, datasets would read all of its kind in the current directory.
    with pytest.raises(InputError, match="--data-files"):
        stream("format", inputs=HubDataset("parquet"))


@pytest.mark.parametrize(
    ("name", "split", "columns", "words"),
    [
        ("", "tset", COLUMNS, "'tset'"),
        ("nothing", "train", COLUMNS, "cannot be read"),
        ("", "train", Columns(text="text"), "the columns are: body, licence"),
    ],
)
def test_what_cannot_be_read(folder, stream, tmp_path, name, split, columns, words):
    dataset = HubDataset(str(folder / name), split=split)
    for skip in (False, True):  # a missing column is no fault of a row
        with pytest.raises(InputError, match=words) as caught:
            stream(inputs=dataset, columns=columns, skip_bad_rows=skip)
        assert "Fix the row" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_with_a_configuration(folder):
    assert HubDataset.parse("wiki:en", "test") == HubDataset("wiki", "en", "test")
    assert HubDataset.parse("wiki") == HubDataset("wiki", None, "train")
    assert HubDataset.parse(str(folder)) == HubDataset(str(folder))
