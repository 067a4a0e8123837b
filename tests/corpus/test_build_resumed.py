"""A corpus resumes behind its last closed shard, and a streamed one is opened if it is there."""

import json
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns, Corpus, HubDataset, build_corpus
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import CorpusWriter
from prismlm.errors import FormatError, InputError, Interrupted
from tests.helpers import forked
from tests.helpers.records import write_jsonl

SHARD = 4000
COLUMNS = Columns(text="body", license="licence")
# Every seventh is empty and skipped.
ROWS = [
    {
        "body": f"Document {i} says {i * i}. " * (i % 7),
        "licence": "CC0" if i % 2 else None,
        "split": (None, "train", "validation")[i % 3],
    }
    for i in range(3000)
]


class Stop(Exception):
    pass


class StopAfter:
    """A reporter that fails at the so-manieth report."""

    def __init__(self, left, error=Stop):
        self.left, self.error = left, error

    @contextmanager
    def task(self, description, total=None, unit="tokens"):
        self.total = total
        yield self

    def advance(self, amount=1):
        self.left -= 1
        if self.left == 0:
            raise self.error

    def note(self, text):
        self.text = text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((row["body"] for row in ROWS), 300).save_pretrained(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("folder") / "numbers"
    directory.mkdir()
    for part in range(3):
        rows = pa.Table.from_pylist(ROWS[part * 1000 : (part + 1) * 1000])
        pq.write_table(rows, directory / f"train-{part}.parquet", row_group_size=170)
    return directory


def stream(folder, out, tokenizer, **options):
    options = {"columns": COLUMNS, "shard_tokens": SHARD, **options}
    return reused(HubDataset(str(folder)), out, tokenizer, **options)


def reused(dataset, out, tokenizer, **options):
    return build_corpus(dataset, out, tokenizer=tokenizer.name_or_path, reuse=True, **options)


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_documents_of_closed_shards_are_not_tokenised_again(
    folder, tokenizer, tmp_path, monkeypatch
):
    whole = stream(folder, tmp_path / "whole", tokenizer)
    with pytest.raises(Stop):
        stream(folder, tmp_path / "out", tokenizer, progress=StopAfter(2))
    state = json.loads((tmp_path / ".out.partial" / "build.json").read_text())
    closed = sum(shard["documents"] for shard in state["shards"])
    assert closed > 1000
    again = StopAfter(10**6)
    added, add = [], CorpusWriter.add
    monkeypatch.setattr(
        CorpusWriter, "add", lambda self, *given: added.append(given) or add(self, *given)
    )
    corpus = stream(folder, tmp_path / "out", tokenizer, progress=again)
    assert again.text == f"{closed:,} documents were kept"
    assert len(added) == len(corpus) - closed
    assert contents(corpus.path) == contents(whole.path)
    assert not (tmp_path / ".out.partial").exists()


@pytest.fixture
def texts(tmp_path):
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(3):
        (directory / f"{number}.txt").write_text(f"Text {number} of three. " * 9)
    rows = [{"text": f"Row {number} of many. " * 9} for number in range(2000)]
    write_jsonl(directory / "rows.jsonl", rows)
    return directory


def test_files_resume_where_their_last_shard_ended(texts, tokenizer, tmp_path):
    def build(out, **options):
        options = {"tokenizer": tokenizer.name_or_path, "shard_tokens": SHARD, **options}
        return build_corpus(texts, tmp_path / out, **options)

    whole = build("whole")
    with pytest.raises(Stop):
        build("out", progress=StopAfter(2))
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        build("out", heldout_fraction=0.5)
    assert contents(build("out").path) == contents(whole.path)
    with pytest.raises(Stop):
        build("out", overwrite=True, progress=StopAfter(2))
    assert contents(tmp_path / "out") == contents(whole.path)
    assert build("out", overwrite=True, heldout_fraction=0.5).split("heldout").size > 500


def test_what_another_version_began_is_replaced_where_that_is_asked(texts, tokenizer, tmp_path):
    def build(**options):
        tokens = {"tokenizer": tokenizer.name_or_path, "shard_tokens": SHARD}
        return build_corpus(texts, tmp_path / "out", **tokens, **options)

    with pytest.raises(Stop):
        build(progress=StopAfter(2))
    state = tmp_path / ".out.partial" / "build.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 3}))
    with pytest.raises(FormatError, match=r"another version or damaged: remove .*\.out\.partial"):
        build()
    assert len(build(overwrite=True)) == 2003
    assert not state.parent.exists()


def test_files_that_changed_since_are_not_mixed_in(texts, tokenizer, tmp_path):
    with pytest.raises(Stop):
        build_corpus(
            texts, tmp_path / "out", tokenizer=tokenizer.name_or_path, shard_tokens=SHARD,
            progress=StopAfter(2),
        )  # fmt: skip
    rows = texts / "rows.jsonl"
    whole = rows.read_text()
    # Of the same size and ids.
    rows.write_text(whole.replace("Row 5 of", "Row 6 of"))
    with pytest.raises(InputError, match=r"input documents have changed since"):
        build_corpus(texts, tmp_path / "out", tokenizer=tokenizer.name_or_path)
    rows.write_text(whole)
    (texts / "0.txt").write_text("Another text.")
    with pytest.raises(InputError, match=r"another input \(files: .*remove it"):
        build_corpus(texts, tmp_path / "out", tokenizer=tokenizer.name_or_path)


def test_a_corpus_that_is_there_is_opened_and_not_read_again(folder, tokenizer, tmp_path):
    first = stream(folder, tmp_path / "out", tokenizer)
    times = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    assert stream(folder, tmp_path / "out", tokenizer).fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == times
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        stream(folder, tmp_path / "out", tokenizer, heldout_fraction=0.5)
    train_tokenizer(iter(["other text"]), 260).save_pretrained(tmp_path / "tokenizer")
    other = load_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=r"another input \(tokenizer: "):
        stream(folder, tmp_path / "out", other)


def test_what_was_begun_otherwise_is_not_mixed_in(folder, tokenizer, tmp_path):
    with pytest.raises(Stop):
        stream(folder, tmp_path / "out", tokenizer, progress=StopAfter(1))
    with pytest.raises(InputError, match="columns: "):
        stream(folder, tmp_path / "out", tokenizer, columns=Columns(text="body"))
    shard = tmp_path / ".out.partial" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(FormatError, match=r"tokens-00000\.bin has \d+ bytes, expected"):
        stream(folder, tmp_path / "out", tokenizer)


def test_other_directories_are_left_alone(folder, tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is not a corpus"):
        stream(folder, tmp_path / "out", tokenizer)
    (tmp_path / "a.txt").write_text("A text.")
    files = build_corpus(tmp_path / "a.txt", tmp_path / "files", vocab_size=300)
    with pytest.raises(InputError, match="from files, not from a dataset"):
        stream(folder, files.path, tokenizer)


def test_a_failure_with_nothing_to_go_on_from_leaves_nothing(folder, tokenizer, tmp_path):
    with pytest.raises(InputError, match="the columns are: body, licence"):
        stream(folder, tmp_path / "out", tokenizer, columns=Columns())
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_says_what_is_kept(folder, tokenizer, tmp_path):
    with pytest.raises(Interrupted, match=r"\.out\.partial\."):
        stream(folder, tmp_path / "out", tokenizer, progress=StopAfter(2, KeyboardInterrupt))


def test_files_of_a_named_format(tokenizer, tmp_path):
    for part in range(2):
        lines = (json.dumps(row) + "\n" for row in ROWS[part * 50 : part * 50 + 50])
        (tmp_path / f"part-{part}.jsonl").write_text("".join(lines))
    both = HubDataset("json", data_files=(str(tmp_path / "part-*.jsonl"),))
    corpus = reused(both, tmp_path / "both", tokenizer, columns=COLUMNS)
    assert [corpus.text(i) for i in range(len(corpus))] == [
        row["body"] for row in ROWS[:100] if row["body"]
    ]
    one = HubDataset("json", data_files=(str(tmp_path / "part-1.jsonl"),))
    corpus = reused(one, tmp_path / "one", tokenizer, columns=COLUMNS)
    assert corpus.doc_ids[0] == "part-1:1"
    assert Path(corpus.meta["origin"]["data_files"][0]).is_absolute()
    assert Corpus.open(tmp_path / "one").fingerprint == corpus.fingerprint


def test_without_datasets_or_a_network_the_error_says_so(tmp_path):
    def message(code):
        return forked.run(code=code).stderr.splitlines()[-1]

    read = "from prismlm.corpus.datasets import *; DatasetReader(HubDataset('no-one/nothing'))"
    assert "pip install 'prismlm[datasets]'" in message(
        "import sys; sys.modules['datasets'] = None; " + read
    )
    # As all tests are: HF_HUB_OFFLINE is set.
    assert "no-one/nothing cannot be reached" in message(read)
