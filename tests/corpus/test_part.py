"""A corpus made in parts: equal however it is divided, resumed part by part, filtered."""

import os
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Filters, build_corpus, formats
from prismlm.corpus import part as module
from prismlm.corpus.part import CorpusPart
from prismlm.corpus.tokenizer import train_tokenizer
from prismlm.errors import InputError, Interrupted
from prismlm.parts import ENGINES
from tests.corpus.test_part_directory import contents
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.records import write_jsonl

WORDS = "the sea and the land that have been with us to be of use in every year".split()  # noqa: SIM905
GOOD = " ".join(WORDS * 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The directory of a tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((f"Row {n} of {n * n} many é." for n in range(200)), 300).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def texts(tmp_path):
    """Files that parts share, and files that belong to one part."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(3):
        (directory / f"{number}.txt").write_text(f"Text {number} of three. " * 9)
    (directory / "4.txt").write_text("")
    lines = [f'{{"text": "Row {number} of many é."}}' for number in range(200)]
    (directory / "rows.jsonl").write_text("\ufeff" + "\r\n\n".join(lines))
    with pa.CompressedOutputStream(str(directory / "z.jsonl.gz"), "gzip") as file:
        file.write("\n".join(lines[:50]).encode())
    table = pa.table({"text": [f"Cell {n} of a table." for n in range(200)]})
    pq.write_table(table, directory / "table.parquet", row_group_size=9)
    (directory / "zz.txt").write_text("")
    return directory


@pytest.fixture
def build(texts, tokenizer, tmp_path):
    """Build a corpus from files, or from rows, in four parts."""

    def build(out="out", inputs=texts, rows=None, **others):
        if rows is not None:
            inputs = write_jsonl(tmp_path / "rows.jsonl", rows)
        options = {"tokenizer": tokenizer, "parts": 4} | others
        return build_corpus(inputs, tmp_path / out, **options)

    return build


def written(corpus):
    """Return all that a corpus says of its documents."""
    columns = [corpus.column(name) for name in ("doc_id", "source", "license")]
    facts = {name: corpus.meta.get(name) for name in ("counts", "left_out", "heldout", "read")}
    texts = [corpus.text(number) for number in range(len(corpus))]
    splits = corpus.split("heldout").tolist(), corpus.starts.tolist()
    return corpus.fingerprint, columns, facts, texts, splits, corpus.tokens(0, 99).tolist()


@pytest.mark.parametrize(("counted", "parts"), [(2**30, 40), (0, 7)])
def test_a_corpus_is_the_same_in_any_number_of_parts(build, counted, parts, monkeypatch):
    monkeypatch.setattr(formats, "MAX_COUNTED", counted)
    whole = build("whole", parts=1)
    assert len(whole) == 453
    rows = [name for name in whole.doc_ids if name.startswith("rows.jsonl:")]
    assert rows[:2] == (["rows.jsonl:1", "rows.jsonl:3"] if counted else ["rows.jsonl:@0", rows[1]])
    assert written(build("parts", parts=parts)) == written(whole)
    trained = [build(f"t{n}", parts=n, tokenizer=None, vocab_size=290) for n in (1, 5)]
    assert written(trained[0]) == written(trained[1])


def test_a_tokenizer_is_trained_on_texts_from_all_over_the_input(tmp_path, monkeypatch):
    rows = [{"text": f"Row {number} of many é."} for number in range(600)]
    part = CorpusPart(tmp_path / "out", None, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert part.training_texts() == [row["text"] for row in rows]
    monkeypatch.setattr(module, "PLACE_BYTES", 1000)
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 3000)
    texts = part.training_texts()
    assert sum(map(len, texts)) == 3000
    numbers = [int(text.split()[1]) for text in texts if "many" in text]
    assert numbers == sorted(numbers)
    assert {number // 40 for number in numbers} == set(range(15))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_workers_of_every_engine_write_the_same_files(engine, build):
    if engine != "local":
        pytest.importorskip(engine)
    pytest.importorskip("datatrove")
    # Ray takes long to start the workers of each step.
    options = {"tokenizer": None, "vocab_size": 290, "filters": Filters(near_duplicates=True)}
    options = {} if engine == "ray" else options
    expected = build("one", **options)
    workers = build("workers", engine=engine, workers=2, **options)
    assert contents(workers.path) == contents(expected.path)
    assert not list(expected.path.parent.glob(".*"))


def test_finished_parts_are_kept_and_those_of_other_input_refused(build, texts, tmp_path):
    whole = build("whole")
    with pytest.raises(Interrupted, match=r"kept in .*\.out\.partial"):
        build(progress=InterruptAfter(3))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".out.partial/part-*")}
    assert len(kept) == 2
    rows = texts / "rows.jsonl"
    before, times = rows.read_bytes(), rows.stat()
    # Size and ids are unchanged.
    rows.write_bytes(before.replace(b"Row 5 of", b"Row 6 of"))
    changed = r"another input \(files: 8 files, .* → 8 files, .*--overwrite"
    with pytest.raises(InputError, match=changed):
        build()
    rows.write_bytes(before)
    os.utime(rows, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"heldout_fraction: 0\.05 → 0\.5"):
        build(heldout_fraction=0.5)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert contents(build().path) == contents(whole.path)
    with pytest.raises(Interrupted):
        build(overwrite=True, progress=InterruptAfter(3))
    assert build(overwrite=True, heldout_fraction=0.5).split("heldout").size > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts", "whole"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_changes_during_the_build_is_named(remote, texts, tokenizer, tmp_path):
    if remote:
        upath = pytest.importorskip("upath")
        copy = upath.UPath(f"memory://{tmp_path.name}")
        copy.mkdir()
        for path in texts.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        texts = copy
    part = CorpusPart(tmp_path / "out", tokenizer, texts if remote else [texts])
    part(None, 0, 3)
    listed = part.list_inputs(3)
    table = texts / "table.parquet"
    table.write_bytes(table.read_bytes() + b" ")
    with pytest.raises(InputError, match=r"table\.parquet has changed since it was listed"):
        listed.make(None, 2, 3)
    table.unlink()
    with pytest.raises(InputError, match=r"table\.parquet cannot be read"):
        listed.make(None, 2, 3)


def test_parts_by_themselves_and_the_last_one_writes_the_corpus(build, texts, tokenizer, tmp_path):
    part = CorpusPart(tmp_path / "out", tokenizer, texts, vocab_size=290)
    for named in (None, tokenizer):  # the first part trains one
        expected = build("whole", parts=3, tokenizer=named, vocab_size=290, overwrite=True)
        shutil.rmtree(part.out, ignore_errors=True)
        for number in (2, 0, 1):
            assert not part.out.exists()
            replace(part, tokenizer=named)(None, number, 3)
        assert contents(part.out) == contents(expected.path)
    for other, message in (
        (replace(part, tokenizer=None, inputs=None), "name a tokenizer"),
        (replace(part, filters=Filters(near_duplicates=True)), "MinHash before it"),
        (part, "--overwrite"),
    ):
        with pytest.raises(InputError, match=message):
            other([], 0, 2)


def test_an_id_of_the_steps_before_is_named(tokenizer, tmp_path):
    pytest.importorskip("datatrove")
    from datatrove.data import Document

    part = CorpusPart(tmp_path / "out", tokenizer)
    part([Document(GOOD, "a"), Document(GOOD, "b")], 0, 2)
    with pytest.raises(InputError, match="part 2 of 2: another document has the id 'a' too"):
        part([Document(GOOD, "a"), Document(GOOD, "c")], 1, 2)


def test_what_cannot_be_started_leaves_no_files(build, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train_tokenizer", lambda *_: pytest.fail("trained first"))
    for options, message in (
        ({"workers": 5, "tokenizer": None}, "5 workers for 4 part"),
        ({"filters": Filters(languages=("en", "xq"))}, "unknown language xq"),
    ):
        with pytest.raises(InputError, match=message):
            build(**options)
    (texts / "2.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"2\.txt is not UTF-8"):
        build(parts=1)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def near_duplicates():
    """Return 60 texts in threes: a text, the same with another last word, and others."""
    rows = []
    for n in range(60):
        words = [
            WORDS[(n // 3 * 7 + k * k) % len(WORDS)] + "xyz"[n // 3 % 3] * (n // 9)
            for k in range(60)
        ]
        rows.append({"id": f"d{n}", "text": " ".join([*words, "end" if n % 3 else "last"])})
    return [*rows[20:], *rows[:20]]


def test_of_near_duplicates_the_first_is_kept(build):
    pytest.importorskip("datatrove")
    rows, first = near_duplicates(), dict[int, str]()
    for row in rows:
        first.setdefault(int(row["id"][1:]) // 3, row["id"])
    options = {"rows": rows, "filters": Filters(near_duplicates=True)}
    one, five = (build(f"in {parts}", parts=parts, **options) for parts in (1, 5))
    assert sorted(one.doc_ids) == sorted(first.values())
    assert one.meta["left_out"] == {"near-duplicate": 40}
    assert written(one) == written(five)


@pytest.mark.parametrize(
    "options", [{"tokenizer": None, "vocab_size": 290}, {"filters": Filters(near_duplicates=True)}]
)
def test_an_id_in_two_parts_is_refused_or_left_out(options, build):
    if "filters" in options:
        pytest.importorskip("datatrove")
    rows = [row | {"id": f"d{n % 23}"} for n, row in enumerate(near_duplicates())]
    with pytest.raises(InputError, match=r"rows\.jsonl:\d+: another document has the id 'd"):
        build(rows=rows, parts=5, **options)
    options = options | {"rows": rows, "skip_bad_rows": True, "overwrite": True}
    one, five = (build(f"in {parts}", parts=parts, **options) for parts in (1, 5))
    assert one.meta["left_out"]["id used before"] == (1 if "filters" in options else 37)
    assert written(one) == written(five)


def test_texts_are_left_out_by_language_and_quality(build):
    pytest.importorskip("datatrove")
    pytest.importorskip("py3langid")
    german = "Das Meer und das Land to be with gehören uns allen. " * 12
    rows = [{"text": text} for text in (GOOD, german, "The sea.", "# " * 90 + GOOD)]
    built = build(rows=rows, filters=Filters(("en",), quality=True))
    assert built.doc_ids == ["rows.jsonl:1"]
    reasons = {"language de": 1, "quality: short doc": 1, "quality: too many hashes": 1}
    assert built.meta["left_out"] == reasons
    both = build("both", rows=rows, filters=Filters(("en", "de"), quality=True))
    assert both.doc_ids == ["rows.jsonl:1", "rows.jsonl:2"]
