"""An index by real workers of each engine equals that of one process."""

import os
import pickle
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest

from prismlm.errors import InputError, PrismError
from prismlm.lens import suffixes
from prismlm.lens.build import IndexPart, index, index_in_parts
from prismlm.lens.layout import read_meta
from prismlm.lens.options import IndexOptions
from prismlm.parts import Parts
from tests.helpers.interrupted import wait_for
from tests.helpers.tiny_index import save_model
from tests.lens.test_build import assert_same_lens

OPTIONS = IndexOptions(contexts=4, window=32, positions=0.5)
RANGES = replace(OPTIONS, range_bytes=20_000)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The directories of a model and a corpus."""
    return save_model(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    return index(*inputs, tmp_path_factory.mktemp("straight") / "lens", OPTIONS, device="cpu")


@pytest.fixture(scope="module")
def in_ranges(inputs, tmp_path_factory):
    return index(*inputs, tmp_path_factory.mktemp("ranges") / "lens", RANGES, device="cpu")


@pytest.fixture
def part(inputs, tmp_path):
    return IndexPart(*inputs, tmp_path / "lens", OPTIONS, "cpu")


def test_parts_give_the_lens_of_one_and_finished_ones_are_not_read_again(part, straight):
    replace(part, merge=False)(None, 2, 3)
    finished = Parts(part.lens, 3).part(2)
    before = finished.stat().st_mtime_ns
    replace(part, merge=False)(None, 2, 3)
    part(None, 0, 3)
    assert finished.stat().st_mtime_ns == before
    assert_same_lens(straight, index_in_parts(part, 3))
    replace(part, merge=False, overwrite=True)(None, 0, 3)  # with other options
    index_in_parts(replace(part, overwrite=True, options=replace(OPTIONS, contexts=2)), 3)
    assert read_meta(part.lens).contexts == 2
    with pytest.raises(InputError, match="exists"):
        index_in_parts(part, 3)
    with pytest.raises(InputError, match="nowhere is not a directory"):
        replace(part, model=part.model / "nowhere", overwrite=True)(None, 0, 3)


@pytest.mark.slow
def test_workers_of_each_engine_give_the_lens_of_one(part, in_ranges, engine, monkeypatch):
    # Workers need not have the current directory of this process.
    monkeypatch.chdir(part.lens.parent)
    part = replace(part, lens=Path("lens"), options=RANGES)
    assert_same_lens(in_ranges, index_in_parts(part, 5, engine=engine, workers=2))
    assert len(read_meta(part.lens).cells["ranges"]) > 2
    assert [path.name for path in part.lens.absolute().parent.iterdir()] == ["lens"]


def test_the_second_stage_as_a_step_of_any_number_of_tasks(part, in_ranges):
    part = replace(part, options=RANGES)
    for number in range(3):
        replace(part, merge=False)(None, number, 3)
    stop = patch("prismlm.lens.build.run_parts", side_effect=[None, PrismError("stop")])
    with stop as started, pytest.raises(PrismError, match="stop"):
        index_in_parts(part, 3, workers=2)
    assembly = started.call_args.args[0]
    assert len(pickle.dumps(assembly)) < 2000  # without what was read of the parts
    for number in range(2):
        pickle.loads(pickle.dumps(assembly))(None, number, 2)
    assert assembly.finished()
    with patch("prismlm.lens.cell_files.CellFiles.write", pytest.fail):
        part(None, 0, 3)
    assert_same_lens(in_ranges, part.lens)
    with pytest.raises(InputError, match="0 of 3 parts"):
        replace(assembly, parts=Parts(part.lens.with_name("other"), 3))(None, 0, 2)


def test_a_worker_of_the_second_stage_does_not_count_the_jobs(part, in_ranges, monkeypatch):
    """That would read the documents once for each job, of which there may be thousands."""

    def run_apart(work, count, **_):
        for number in range(count):
            pickle.loads(pickle.dumps(work))(None, number, count)

    monkeypatch.setattr("prismlm.lens.build.run_parts", run_apart)
    with patch.object(suffixes, "count_parts", wraps=suffixes.count_parts) as counted:
        assert_same_lens(in_ranges, index_in_parts(replace(part, options=RANGES), 3))
    assert counted.call_count == 2  # by who starts the workers, and who writes the lens


def test_parts_unlike_each_other_are_refused(part, in_ranges):
    """Before anything is made of them; the parts of the others are good."""
    part = replace(part, options=RANGES, merge=False)
    unlike = replace(part, lens=part.lens.with_name("unlike"), options=replace(RANGES, contexts=3))
    part(None, 0, 2)
    unlike(None, 1, 2)  # at the same time, so that it saw no other part
    Parts(unlike.lens, 2).part(1).rename(Parts(part.lens, 2).part(1))
    with pytest.raises(InputError, match=r"unlike each other \(contexts: 4 → 3\).*--overwrite"):
        index_in_parts(part, 2)
    assert_same_lens(in_ranges, index_in_parts(replace(part, overwrite=True), 2))


def drive(part, engine="local"):
    """Index as a command of its own does, in a process group of its own."""
    os.setsid()
    index_in_parts(part, 4, engine=engine, workers=2)


@pytest.mark.slow
def test_the_same_command_after_a_kill(part, in_ranges, engine):
    """Finished parts are kept, and workers do not outlive who started them."""
    part = replace(part, options=RANGES)
    driver = get_context("spawn").Process(target=drive, args=(part, engine))
    driver.start()
    assert driver.pid is not None
    wait_for(lambda: list(Parts(part.lens, 4).path.glob("part-*")))
    name = "ray::Worker" if engine == "ray" else "spawn_main"
    workers = [pid for pid, command in descendants(driver.pid) if name in command]
    assert len(workers) == 2
    os.kill(driver.pid, signal.SIGKILL)
    driver.join(120)
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers), 30)
    assert not part.lens.exists()
    assert_same_lens(in_ranges, index_in_parts(part, 4, engine=engine, workers=2))


def descendants(parent):
    """Return ids and command lines of the processes that a process started, and theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (path / "status").read_text(encoding="utf-8")
            if f"PPid:\t{parent}\n" in status:
                command = (path / "cmdline").read_text(encoding="utf-8")
                found += [(int(path.name), command), *descendants(int(path.name))]
    return found


@pytest.mark.slow
def test_two_commands_on_one_lens(part, in_ranges, engine):
    """The second makes what the first does not, or waits; one of them writes the lens.

    The other may find it written, which it says.
    """
    part = replace(part, options=RANGES)
    both = [get_context("spawn").Process(target=drive, args=(part, engine)) for _ in range(2)]
    for driver in both:
        driver.start()
    for driver in both:
        driver.join(300)
    assert 0 in [driver.exitcode for driver in both]
    assert_same_lens(in_ranges, part.lens)
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
