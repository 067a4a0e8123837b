"""An index in parts, by any workers and after any failure, equals that of one process."""

import copy
import json
import os
import pickle
import random
import shutil
import signal
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from prismlm.corpus import Corpus, build_corpus
from prismlm.errors import FormatError, InputError, Interrupted, PrismError
from prismlm.lens import assembly, layout, scan, suffixes
from prismlm.lens.build import IndexPart, build_index, index_in_parts, write_lens
from prismlm.lens.cell_files import CellFiles
from prismlm.lens.cells import Cells
from prismlm.lens.layout import INDEX_FILE, INDEX_SCHEMA, read_meta
from prismlm.lens.options import IndexOptions, Shard
from prismlm.lens.store import LensFiles
from prismlm.models.checkpoint import load_checkpoint
from prismlm.parts import Parts
from prismlm.progress import Reporter
from tests.helpers.interrupted import InterruptAfter, limit_files, limit_lifted_after, wait_for
from tests.helpers.mixer_models import make_llama, save_with_head

OPTIONS = IndexOptions(contexts=4, window=64, stride=48, split="all")
RANGES = {"positions": 0.5, "range_bytes": 20_000}
WORDS = ["light", "water", "stone", "river", "cell", "law", "price", "star", "tree", "code"]


def assert_same_lens(left, right):
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def make_corpus(directory, seed=0):
    """Write 90 documents of random words in three sources."""
    rng, source = random.Random(seed), directory / "text"
    source.mkdir(parents=True)
    for name in ("a", "b", "c"):
        texts = (" ".join(rng.choices(WORDS, k=rng.randint(5, 240))) for _ in range(30))
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (source / f"{name}.jsonl").write_text("".join(lines))
    return build_corpus([source], directory / "corpus", vocab_size=300, heldout_fraction=0.2)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The directories of a model and a corpus."""
    directory = tmp_path_factory.mktemp("inputs")
    corpus = make_corpus(directory)
    model = make_llama(len(corpus.tokenizer))
    return save_with_head(model, corpus.tokenizer, directory / "model"), corpus.path


@pytest.fixture(scope="module")
def opened(inputs):
    """Model, head and corpus."""
    checkpoint = load_checkpoint(inputs[0])
    return checkpoint.model, checkpoint.sidecar.head, Corpus.open(inputs[1])


@pytest.fixture(scope="module")
def whole(opened, tmp_path_factory):
    """A function that returns the lens that one process builds with some options, built once."""

    @cache
    def build(**changed):
        out = tmp_path_factory.mktemp("whole") / "lens"
        return build_index(*opened, out, replace(OPTIONS, **changed))

    return build


@pytest.fixture(autouse=True)
def few_states_teach_the_centres(monkeypatch):
    """Of product quantisation, which from all of them would take most of the time."""
    monkeypatch.setattr(scan, "SAMPLE", 600)


@pytest.fixture
def build(opened, tmp_path):
    """Index into ``lens`` below tmp_path, with other options or inputs if given."""

    def build(*, inputs=opened, progress=None, overwrite=False, **changed):
        options = replace(OPTIONS, **changed)
        settings = {"overwrite": overwrite, "progress": progress or Reporter()}
        return build_index(*inputs, tmp_path / "lens", options, **settings)

    return build


@pytest.fixture
def part(inputs, tmp_path):
    return IndexPart(*inputs, tmp_path / "lens", replace(OPTIONS, **RANGES), "cpu")


@pytest.mark.parametrize(("codes", "count"), [("int8", 5), ("pq", 2)])
def test_shards_in_any_order_give_the_same_bytes(build, whole, tmp_path, codes, count):
    order = random.Random(count).sample(range(count), count)
    results = [build(shard=Shard(i, count), codes=codes) for i in order]
    assert results == [None] * (count - 1) + [tmp_path / "lens"]
    assert_same_lens(whole(codes=codes), tmp_path / "lens")
    assert [path.name for path in tmp_path.iterdir()] == ["lens"]


def test_contexts_and_documents_by_many_workers(build, whole, monkeypatch):
    """They are those of one; a table of more documents has several files, read as one."""
    one, in_ranges = whole(contexts=100), whole(**RANGES)
    monkeypatch.setattr(assembly, "PROTOTYPES_OF_A_JOB", 5)
    assert_same_lens(build(contexts=100), one)
    monkeypatch.setattr(assembly, "DOCUMENTS_OF_A_JOB", 40)
    several = build(contexts=100, overwrite=True)
    assert pq.read_table(several / INDEX_FILE) == pq.read_table(one / INDEX_FILE)
    cells = [Cells(lens, read_meta(lens).cells) for lens in (one, several)]
    assert len([*several.glob("cell-documents-*.parquet")]) == 3
    assert cells[0].documents.take(np.arange(90)) == cells[1].documents.take(np.arange(90))
    for lens in (several, in_ranges):
        files = LensFiles(lens)
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
    many = RANGES | {"codes": codes}
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
    parts = Parts(tmp_path / "lens", 2)
    build(shard=Shard(1, 2), **RANGES)
    for name in ("positions", "scan.safetensors"):
        path = parts.part(1) / name
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(FormatError, match=rf"00001-of-00002 was damaged or removed .*{name}"):
            build(shard=Shard(0, 2), **RANGES)
    shutil.rmtree(parts.part(1))
    with patch("prismlm.lens.build.write_lens", side_effect=PrismError("stopped")):
        build(shard=Shard(0, 2), **RANGES)
        with pytest.raises(PrismError, match="stopped"):
            build(shard=Shard(1, 2), **RANGES)
    made = next(parts.path.glob("cells-00001-of-*"))
    (made / "cells-00001.npy").write_bytes(b"")
    with pytest.raises(FormatError, match=r"cells-00001.npy has 0 bytes.*Remove"):
        build(shard=Shard(0, 2), **RANGES)
    shutil.rmtree(made)
    assert_same_lens(build(shard=Shard(0, 2), **RANGES), whole(**RANGES))


def test_a_signal_keeps_finished_parts_and_says_how_to_resume(build, whole, tmp_path):
    build(shard=Shard(0, 2))
    stop = InterruptAfter(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="same command again") as raised:
        build(shard=Shard(1, 2), progress=stop)
    assert raised.value.exit_code == 143
    assert str(Parts(tmp_path / "lens", 2).path) in str(raised.value)
    # Finished parts are not read again.
    assert build(shard=Shard(0, 2), progress=InterruptAfter(1, pytest.fail)) is None
    assert_same_lens(whole(), build(shard=Shard(1, 2)))


def test_a_full_disk_leaves_nothing_half_written(build, whole, tmp_path):
    said = r"could not be written.*same command"
    with limit_lifted_after(), pytest.raises(PrismError, match=said):
        build(progress=InterruptAfter(1, lambda: limit_files(20_000)))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".lock")]
    assert not (tmp_path / "lens").exists()
    assert_same_lens(whole(), build())


def test_another_input_is_refused_and_named(build, opened, whole, tmp_path):
    first, second = {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}
    build(**first)
    text, (other, head, _) = make_corpus(tmp_path / "other", seed=3), copy.deepcopy(opened)
    for parameter in (other.lm_head.weight, head.prototypes):
        parameter.data *= 2
    for changed, match in (
        ({"contexts": 5, **first}, r"contexts: 4 → 5.*--overwrite"),
        ({"inputs": (other, head, opened[2]), **first}, r"model: .* → .*prototypes: "),
        ({"inputs": (*opened[:2], text), **first}, "corpus: "),
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


def test_bad_input_is_refused_and_leaves_nothing(build, opened, tmp_path):
    broken = copy.deepcopy(opened)
    broken[0].model.norm.weight.data[0] = torch.nan
    for changed, words in (
        ({"stride": 65}, "--stride is 65: .* from 1 to 64"),
        ({"contexts": 0}, "--contexts is 0"),
        ({"shard": Shard(2, 2)}, "the part to read is 2: .* from 0 to 1"),
        ({"inputs": broken}, "not finite"),
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


def test_parts_give_the_lens_of_one_and_finished_ones_are_not_read_again(part, whole):
    replace(part, merge=False)(None, 2, 3)
    replace(part, merge=False, model=part.model / "gone")(None, 2, 3)
    part(None, 0, 3)
    assert_same_lens(whole(**RANGES), index_in_parts(part, 3))
    replace(part, merge=False, overwrite=True)(None, 0, 3)  # with other options
    index_in_parts(replace(part, overwrite=True, options=replace(part.options, contexts=2)), 3)
    assert read_meta(part.lens).contexts == 2
    with pytest.raises(InputError, match="exists"):
        index_in_parts(part, 3)
    with pytest.raises(InputError, match="nowhere is not a directory"):
        replace(part, model=part.model / "nowhere", overwrite=True)(None, 0, 3)


@pytest.mark.slow
def test_workers_of_each_engine_give_the_lens_of_one(part, whole, engine, monkeypatch):
    # Workers need not have the current directory of this process.
    monkeypatch.chdir(part.lens.parent)
    part = replace(part, lens=Path("lens"))
    assert_same_lens(whole(**RANGES), index_in_parts(part, 5, engine=engine, workers=2))
    assert [path.name for path in part.lens.absolute().parent.iterdir()] == ["lens"]


def test_the_second_stage_as_a_step_of_any_number_of_tasks(part, whole, monkeypatch):
    """No task counts the jobs, which would read the documents anew, and no file is made twice."""
    expected = whole(**RANGES)
    assert len(read_meta(expected).cells["ranges"]) > 2

    def run_apart(step, count, **_):
        assert len(pickle.dumps(step)) < 2000  # without what was read of the parts
        second = isinstance(step, assembly.Assembly)
        count = 2 if second else count
        for number in range(count):
            pickle.loads(pickle.dumps(step))(None, number, count)
        if second:
            assert step.finished()
            monkeypatch.setattr(CellFiles, "write", pytest.fail)
            with pytest.raises(InputError, match="0 of 3 parts"):
                replace(step, parts=Parts(part.lens.with_name("other"), 3))(None, 0, 2)

    monkeypatch.setattr("prismlm.lens.build.run_parts", run_apart)
    with patch.object(suffixes, "count_parts", wraps=suffixes.count_parts) as counted:
        assert_same_lens(expected, index_in_parts(part, 3))
    assert counted.call_count == 2  # by who starts the workers, and who writes the lens


def test_parts_unlike_each_other_are_refused(part, whole):
    """Before anything is made of them; the parts of the others are good."""
    part = replace(part, merge=False)
    options = replace(part.options, contexts=3)
    unlike = replace(part, lens=part.lens.with_name("unlike"), options=options)
    part(None, 0, 2)
    unlike(None, 1, 2)  # at the same time, so that it saw no other part
    Parts(unlike.lens, 2).part(1).rename(Parts(part.lens, 2).part(1))
    with pytest.raises(InputError, match=r"unlike each other \(contexts: 4 → 3\).*--overwrite"):
        index_in_parts(part, 2)
    assert_same_lens(whole(**RANGES), index_in_parts(replace(part, overwrite=True), 2))


def drive(part, engine="local"):
    """Index as a command of its own does, in a process group of its own."""
    os.setsid()
    index_in_parts(part, 4, engine=engine, workers=2)


@pytest.mark.slow
def test_the_same_command_after_a_kill(part, whole, engine):
    """Finished parts are kept, and workers do not outlive who started them."""
    driver = get_context("spawn").Process(target=drive, args=(part, engine))
    driver.start()
    assert driver.pid is not None
    wait_for(lambda: list(Parts(part.lens, 4).path.glob("part-*")))
    name, workers = "ray::Worker" if engine == "ray" else "spawn_main", list[psutil.Process]()

    def both_work():
        started = psutil.Process(driver.pid).children(recursive=True)
        workers[:] = [one for one in started if any(name in word for word in one.cmdline())]
        return len(workers) == 2

    wait_for(both_work)
    os.kill(driver.pid, signal.SIGKILL)
    driver.join(120)
    wait_for(lambda: not any(one.is_running() for one in workers), 30)
    assert not part.lens.exists()
    assert_same_lens(whole(**RANGES), index_in_parts(part, 4, engine=engine, workers=2))


@pytest.mark.slow
def test_two_commands_on_one_lens(part, whole, engine):
    """The second makes what the first does not, or waits; one of them writes the lens.

    The other may find it written, which it says.
    """
    both = [get_context("spawn").Process(target=drive, args=(part, engine)) for _ in range(2)]
    for driver in both:
        driver.start()
    for driver in both:
        driver.join(300)
    assert 0 in [driver.exitcode for driver in both]
    assert_same_lens(whole(**RANGES), part.lens)
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
