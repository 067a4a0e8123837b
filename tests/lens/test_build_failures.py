"""Signals, full disks, two writers and other inputs: what they leave of an index."""

import os
import random
import shutil
import signal
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from prismlm.errors import FormatError, InputError, Interrupted, PrismError
from prismlm.lens import assembly, layout, scan
from prismlm.lens.build import build_index, write_lens
from prismlm.lens.cells import Cells
from prismlm.lens.layout import INDEX_FILE, INDEX_SCHEMA, read_meta
from prismlm.lens.options import Shard
from prismlm.lens.store import LensFiles
from prismlm.parts import Parts
from prismlm.progress import Reporter
from tests.helpers.file_limit import limit_files, limit_lifted_after
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.tiny_index import OPTIONS, make_corpus, make_model
from tests.lens.test_build import assert_same_lens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def model(corpus):
    return make_model(corpus)


@pytest.fixture(scope="module")
def whole(corpus, model, tmp_path_factory):
    """A function that returns the lens that one process builds with some options, built once."""

    @cache
    def build(**changed):
        out = tmp_path_factory.mktemp("whole") / "lens"
        return build_index(*model, corpus, out, replace(OPTIONS, **changed))

    return build


@pytest.fixture(autouse=True)
def few_states_teach_the_centres(monkeypatch):
    """Of product quantisation, which from all of them would take most of the time."""
    monkeypatch.setattr(scan, "SAMPLE", 600)


@pytest.fixture
def build(corpus, model, tmp_path):
    """Index into ``lens`` below tmp_path, with other options or inputs if given."""

    def build(*, inputs=(*model, corpus), progress=None, overwrite=False, **changed):
        options = replace(OPTIONS, **changed)
        settings = {"overwrite": overwrite, "progress": progress or Reporter()}
        return build_index(*inputs, tmp_path / "lens", options, **settings)

    return build


@pytest.mark.parametrize(("codes", "count"), [("int8", 5), ("pq", 2)])
def test_shards_in_any_order_give_the_same_bytes(build, whole, tmp_path, codes, count):
    order = random.Random(count).sample(range(count), count)
    results = [build(shard=Shard(i, count), codes=codes) for i in order]
    assert results == [None] * (count - 1) + [tmp_path / "lens"]
    assert_same_lens(whole(codes=codes), tmp_path / "lens")
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


def test_contexts_and_documents_by_many_workers(build, whole, monkeypatch):
    """They are those of one; a table of more documents has several files, read as one."""
    one = whole(contexts=100)
    monkeypatch.setattr(assembly, "PROTOTYPES_OF_A_JOB", 5)
    assert_same_lens(build(contexts=100), one)
    monkeypatch.setattr(assembly, "DOCUMENTS_OF_A_JOB", 40)
    several = build(contexts=100, overwrite=True)
    assert pq.read_table(several / INDEX_FILE) == pq.read_table(one / INDEX_FILE)
    cells = [Cells(lens, read_meta(lens).cells) for lens in (one, several)]
    assert len([*several.glob("cell-documents-*.parquet")]) == 3
    assert cells[0].documents.take(np.arange(90)) == cells[1].documents.take(np.arange(90))
    files = LensFiles(several)
    files.read_meta()
    files.check()


@pytest.mark.parametrize(
    ("work", "codes", "finished"),
    [
        ("Indexing", "pq", {"centres"}),
        ("Measuring support", "int8", {"part", "cells", "contexts", "documents", "text"}),
    ],
)
def test_what_is_finished_is_not_made_again_after_a_kill(
    build, whole, tmp_path, work, codes, finished
):
    many = {"range_bytes": 20_000, "codes": codes}
    expected = whole(**many)
    kill = InterruptAfter(2, lambda: os.kill(os.getpid(), signal.SIGKILL), work)
    child = get_context("fork").Process(target=build, kwargs={"progress": kill, **many})
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    partial = Parts(tmp_path / "lens", 1).path
    before = {path: path.stat().st_mtime_ns for path in partial.glob("[!.]*/*")}
    assert {path.parent.name.split("-")[0] for path in before} == finished
    after = {}

    def note(*arguments, **settings):
        after.update((path, path.stat().st_mtime_ns) for path in before)
        return write_lens(*arguments, **settings)

    with patch("prismlm.lens.build.write_lens", note):
        assert_same_lens(build(**many), expected)
    assert after == before


def test_a_part_or_range_that_is_damaged_or_missing_is_named(build, whole, tmp_path):
    """The same command makes it again once it is gone."""
    parts, many = Parts(tmp_path / "lens", 2), {"range_bytes": 20_000}
    build(shard=Shard(1, 2), **many)
    for name in ("positions", "scan.safetensors"):
        path = parts.part(1) / name
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(FormatError, match=rf"00001-of-00002 was damaged or removed .*{name}"):
            build(shard=Shard(0, 2), **many)
    shutil.rmtree(parts.part(1))
    with patch("prismlm.lens.build.write_lens", side_effect=PrismError("stopped")):
        build(shard=Shard(0, 2), **many)
        with pytest.raises(PrismError, match="stopped"):
            build(shard=Shard(1, 2), **many)
    made = next(parts.path.glob("cells-00001-of-*"))
    (made / "cells-00001.npy").write_bytes(b"")
    with pytest.raises(FormatError, match=r"cells-00001.npy has 0 bytes.*Remove"):
        build(shard=Shard(0, 2), **many)
    shutil.rmtree(made)
    assert_same_lens(build(shard=Shard(0, 2), **many), whole(**many))


def test_a_signal_keeps_finished_parts_and_says_how_to_resume(build, whole, tmp_path):
    build(shard=Shard(0, 2))
    stop = InterruptAfter(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="same command again") as raised:
        build(shard=Shard(1, 2), progress=stop)
    assert raised.value.exit_code == 143
    assert str(Parts(tmp_path / "lens", 2).path) in str(raised.value)
    # Finished parts are not read again.
    assert build(shard=Shard(0, 2), progress=InterruptAfter(1, pytest.fail)) is None
    assert_same_lens(whole(), build(shard=Shard(1, 2)))


def test_a_full_disk_leaves_nothing_half_written(build, whole, tmp_path):
    out = tmp_path / "lens"
    with (
        limit_lifted_after(),
        pytest.raises(PrismError, match=r"could not be written.*same command"),
    ):
        build(progress=InterruptAfter(1, lambda: limit_files(20_000)))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".lock")]
    assert not out.exists()
    assert_same_lens(whole(), build())


def test_another_input_is_refused_and_named(build, model, corpus, whole, tmp_path):
    first, second = {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}
    build(**first)
    text = make_corpus(tmp_path / "other", seed=3)
    for changed, match in (
        ({"contexts": 5, **first}, r"contexts: 4 → 5.*--overwrite"),
        ({"inputs": (*make_model(corpus, seed=1), corpus), **first}, r"model: .* → .*prototypes: "),
        ({"inputs": (*model, text), **first}, "corpus: "),
        ({"shard": Shard(0, 3)}, "shards: 2 → 3"),
    ):
        with pytest.raises(InputError, match=match):
            build(**changed)
    with (
        patch("prismlm.lens.build.device_kind", lambda device: "NVIDIA H200"),
        patch("prismlm.__version__", "9"),
        pytest.raises(InputError, match=r"device: cpu → NVIDIA H200; prismlm: .* → 9"),
    ):
        build(**second)
    build(contexts=5, **first, overwrite=True)
    build(**first, overwrite=True)
    assert_same_lens(whole(), build(**second))


def test_bad_input_is_refused_and_leaves_nothing(build, corpus, tmp_path):
    broken, head = make_model(corpus)
    with torch.no_grad():
        broken.get_output_embeddings().weight[:] = torch.nan
        broken.model.norm.weight[0] = torch.nan
    for changed, words in (
        ({"stride": 65}, "--stride is 65: .* from 1 to 64"),
        ({"contexts": 0}, "--contexts is 0"),
        ({"shard": Shard(2, 2)}, "the part to read is 2: .* from 0 to 1"),
        ({"inputs": (broken, head, corpus)}, "not finite"),
    ):
        with pytest.raises(InputError, match=words):
            build(**changed)
    assert not list(tmp_path.iterdir())


def test_contexts_are_joined_a_file_at_a_time(tmp_path, monkeypatch):
    """With 65,536 prototypes they are gigabytes."""
    rows, held, files = 1000, list[int](), [tmp_path / f"{n}.parquet" for n in range(20)]
    columns = [pa.nulls(rows, field.type) for field in INDEX_SCHEMA][:-3]
    table = pa.table([*columns, *[pa.array(["x" * 160] * rows)] * 3], schema=INDEX_SCHEMA)
    for file in files:
        layout.write_table(table, file)
    monkeypatch.setattr(assembly, "CONTEXT_ROWS", 300)

    def read(path):
        held.append(pa.total_allocated_bytes() - before)
        return pq.read_table(path)

    monkeypatch.setattr(layout, "read_table", read)
    before = pa.total_allocated_bytes()
    assembly._join(files, tmp_path / "all")
    assert max(held) < 3 * table.nbytes
    groups = pq.ParquetFile(tmp_path / "all").metadata.to_dict()["row_groups"]
    assert [group["num_rows"] for group in groups] == [300] * 66 + [200]
    assert pq.read_table(tmp_path / "all") == pa.concat_tables([table] * 20)
