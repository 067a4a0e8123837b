"""An interrupted build resumes after its last closed shard; a finished one can be reused."""

import json
import re
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns, Corpus, HubDataset, build_corpus
from prismlm.corpus.tokenizer import train_tokenizer
from prismlm.corpus.writer import CorpusWriter
from prismlm.errors import FormatError, InputError, Interrupted
from tests.corpus.test_build import contents
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
    """A reporter that raises an error at its n-th report."""

    def __init__(self, reports, error=Stop):
        self.left, self.error = reports, error

    @contextmanager
    def task(self, description, total=None, unit="tokens"):
        yield self

    def advance(self, amount=1):
        self.left -= 1
        if self.left == 0:
            raise self.error

    def note(self, text):
        self.text = text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The directory of a tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((row["body"] for row in ROWS), 300).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("folder") / "numbers"
    directory.mkdir()
    for part in range(3):
        rows = pa.Table.from_pylist(ROWS[part * 1000 : (part + 1) * 1000])
        pq.write_table(rows, directory / f"train-{part}.parquet", row_group_size=170)
    return directory


@pytest.fixture
def stream(folder, tokenizer, tmp_path):
    """Build a corpus from the folder as a dataset, and reuse it."""
    options = {"columns": COLUMNS, "shard_tokens": SHARD, "tokenizer": tokenizer, "reuse": True}

    def build(out="out", **others):
        return build_corpus(HubDataset(str(folder)), tmp_path / out, **options | others)

    return build


@pytest.fixture
def texts(tmp_path):
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(3):
        (directory / f"{number}.txt").write_text(f"Text {number} of three. " * 9)
    rows = [{"text": f"Row {number} of many. " * 9} for number in range(2000)]
    write_jsonl(directory / "rows.jsonl", rows)
    return directory


@pytest.fixture
def build(texts, tokenizer, tmp_path):
    """Build a corpus from files."""
    options = {"tokenizer": tokenizer, "shard_tokens": SHARD}

    def build(out="out", **others):
        return build_corpus(texts, tmp_path / out, **options | others)

    return build


def test_documents_of_closed_shards_are_not_tokenised_again(stream, tmp_path, monkeypatch):
    whole = stream("whole")
    with pytest.raises(Stop):
        stream(progress=StopAfter(2))
    state = json.loads((tmp_path / ".out.partial" / "build.json").read_text())
    closed = sum(shard["documents"] for shard in state["shards"])
    assert closed > 1000
    added, add = [], CorpusWriter.add
    monkeypatch.setattr(
        CorpusWriter, "add", lambda self, *given: added.append(given) or add(self, *given)
    )
    reporter = StopAfter(10**6)
    corpus = stream(progress=reporter)
    assert reporter.text == f"{closed:,} documents were kept"
    assert len(added) == len(corpus) - closed
    assert contents(corpus.path) == contents(whole.path)
    assert not (tmp_path / ".out.partial").exists()


def test_files_resume_after_their_last_closed_shard(build, tmp_path):
    whole = build("whole")
    with pytest.raises(Stop):
        build(progress=StopAfter(2))
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        build(heldout_fraction=0.5)
    assert contents(build().path) == contents(whole.path)
    with pytest.raises(Stop):
        build(overwrite=True, progress=StopAfter(2))
    assert contents(tmp_path / "out") == contents(whole.path)
    assert build(overwrite=True, heldout_fraction=0.5).split("heldout").size > 500


def test_overwrite_discards_the_state_of_another_version(build, tmp_path):
    with pytest.raises(Stop):
        build(progress=StopAfter(2))
    state = tmp_path / ".out.partial" / "build.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 3}))
    with pytest.raises(FormatError, match=r"another version or damaged: remove .*\.out\.partial"):
        build()
    assert len(build(overwrite=True)) == 2003
    assert not state.parent.exists()


def test_changed_input_files_are_refused(build, texts):
    with pytest.raises(Stop):
        build(progress=StopAfter(2))
    rows = texts / "rows.jsonl"
    before = rows.read_text()
    # Size and ids are unchanged.
    rows.write_text(before.replace("Row 5 of", "Row 6 of"))
    with pytest.raises(InputError, match="input documents have changed since"):
        build()
    rows.write_text(before)
    (texts / "0.txt").write_text("Another text.")
    with pytest.raises(InputError, match=r"another input \(files: .*remove it"):
        build()


def test_other_columns_and_damaged_shards_are_refused(stream, tmp_path):
    with pytest.raises(Stop):
        stream(progress=StopAfter(1))
    with pytest.raises(InputError, match="columns: "):
        stream(columns=Columns(text="body"))
    shard = tmp_path / ".out.partial" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(FormatError, match=r"tokens-00000\.bin has \d+ bytes, expected"):
        stream()


@pytest.mark.parametrize("name", ["tokens", "documents", "text"])
def test_a_partial_corpus_with_a_flipped_bit_is_refused(build, tmp_path, name):
    with pytest.raises(Stop):
        build(progress=StopAfter(2))
    partial = tmp_path / ".out.partial"
    (path,) = partial.glob(f"{name}-00000.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"damaged.* Remove {re.escape(str(partial))} to start"):
        build()


def test_an_existing_corpus_is_reused_only_for_equal_settings(stream, tmp_path):
    first = stream()
    times = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    assert stream().fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == times
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        stream(heldout_fraction=0.5)
    train_tokenizer(iter(["other text"]), 260).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"another input \(tokenizer: "):
        stream(tokenizer=tmp_path / "other")
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError, match="is not a corpus"):
        stream("notes")
    (tmp_path / "a.txt").write_text("A text.")
    build_corpus(tmp_path / "a.txt", tmp_path / "files", vocab_size=300)
    with pytest.raises(InputError, match="from files, not from a dataset"):
        stream("files")


def test_a_failure_without_closed_shards_leaves_no_files(stream, tmp_path):
    with pytest.raises(InputError, match="the columns are: body, licence"):
        stream(columns=Columns())
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_names_the_directory_of_closed_shards(stream):
    with pytest.raises(Interrupted, match=r"\.out\.partial\."):
        stream(progress=StopAfter(2, KeyboardInterrupt))


def test_data_files_of_a_named_format(tokenizer, tmp_path):
    for part in range(2):
        lines = (json.dumps(row) + "\n" for row in ROWS[part * 50 : part * 50 + 50])
        (tmp_path / f"part-{part}.jsonl").write_text("".join(lines))

    def stream(files):
        dataset = HubDataset("json", data_files=(str(tmp_path / files),))
        options = {"tokenizer": tokenizer, "columns": COLUMNS, "reuse": True}
        return build_corpus(dataset, tmp_path / f"from {files}", **options)

    corpus = stream("part-*.jsonl")
    texts = [corpus.text(i) for i in range(len(corpus))]
    assert texts == [row["body"] for row in ROWS[:100] if row["body"]]
    corpus = stream("part-1.jsonl")
    assert corpus.doc_ids[0] == "part-1:1"
    assert corpus.meta["origin"]["data_files"] == [str(tmp_path / "part-1.jsonl")]
    assert Corpus.open(corpus.path).fingerprint == corpus.fingerprint


def test_a_missing_package_or_network_is_named():
    def message(code):
        return forked.run(code=code).stderr.splitlines()[-1]

    read = "from prismlm.corpus.datasets import *; DatasetReader(HubDataset('no-one/nothing'))"
    assert "pip install 'prismlm[datasets]'" in message(
        "import sys; sys.modules['datasets'] = None; " + read
    )
    # HF_HUB_OFFLINE is set in all tests.
    assert "no-one/nothing cannot be reached" in message(read)
