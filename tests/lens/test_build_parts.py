"""An index by real workers of each engine equals that of one process."""

import os
import pickle
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from prismlm.errors import InputError
from prismlm.lens import suffixes
from prismlm.lens.assembly import Assembly
from prismlm.lens.build import IndexPart, index, index_in_parts
from prismlm.lens.cell_files import CellFiles
from prismlm.lens.layout import read_meta
from prismlm.lens.options import IndexOptions
from prismlm.parts import Parts
from tests.helpers.interrupted import wait_for
from tests.helpers.tiny_index import save_model
from tests.lens.test_build import assert_same_lens

OPTIONS = IndexOptions(contexts=4, window=32, positions=0.5, range_bytes=20_000)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The directories of a model and a corpus."""
    return save_model(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    lens = index(*inputs, tmp_path_factory.mktemp("whole") / "lens", OPTIONS, device="cpu")
    assert len(read_meta(lens).cells["ranges"]) > 2
    return lens


@pytest.fixture
def part(inputs, tmp_path):
    return IndexPart(*inputs, tmp_path / "lens", OPTIONS, "cpu")


def test_parts_give_the_lens_of_one_and_finished_ones_are_not_read_again(part, whole):
    replace(part, merge=False)(None, 2, 3)
    finished = Parts(part.lens, 3).part(2)
    before = finished.stat().st_mtime_ns
    replace(part, merge=False)(None, 2, 3)
    part(None, 0, 3)
    assert finished.stat().st_mtime_ns == before
    assert_same_lens(whole, index_in_parts(part, 3))
    replace(part, merge=False, overwrite=True)(None, 0, 3)  # with other options
    index_in_parts(replace(part, overwrite=True, options=replace(OPTIONS, contexts=2)), 3)
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
    assert_same_lens(whole, index_in_parts(part, 5, engine=engine, workers=2))
    assert [path.name for path in part.lens.absolute().parent.iterdir()] == ["lens"]


def test_the_second_stage_as_a_step_of_any_number_of_tasks(part, whole, monkeypatch):
    """No task counts the jobs, which would read the documents anew, and no file is made twice."""

    def run_apart(step, count, **_):
        assert len(pickle.dumps(step)) < 2000  # without what was read of the parts
        second = isinstance(step, Assembly)
        for number in range(count := 2 if second else count):
            pickle.loads(pickle.dumps(step))(None, number, count)
        if second:
            assert step.finished()
            monkeypatch.setattr(CellFiles, "write", pytest.fail)
            with pytest.raises(InputError, match="0 of 3 parts"):
                replace(step, parts=Parts(part.lens.with_name("other"), 3))(None, 0, 2)

    monkeypatch.setattr("prismlm.lens.build.run_parts", run_apart)
    with patch.object(suffixes, "count_parts", wraps=suffixes.count_parts) as counted:
        assert_same_lens(whole, index_in_parts(part, 3))
    assert counted.call_count == 2  # by who starts the workers, and who writes the lens


def test_parts_unlike_each_other_are_refused(part, whole):
    """Before anything is made of them; the parts of the others are good."""
    part = replace(part, merge=False)
    unlike = replace(part, lens=part.lens.with_name("unlike"), options=replace(OPTIONS, contexts=3))
    part(None, 0, 2)
    unlike(None, 1, 2)  # at the same time, so that it saw no other part
    Parts(unlike.lens, 2).part(1).rename(Parts(part.lens, 2).part(1))
    with pytest.raises(InputError, match=r"unlike each other \(contexts: 4 → 3\).*--overwrite"):
        index_in_parts(part, 2)
    assert_same_lens(whole, index_in_parts(replace(part, overwrite=True), 2))


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
    name = "ray::Worker" if engine == "ray" else "spawn_main"
    started = psutil.Process(driver.pid).children(recursive=True)
    workers = [one for one in started if any(name in word for word in one.cmdline())]
    assert len(workers) == 2
    os.kill(driver.pid, signal.SIGKILL)
    driver.join(120)
    wait_for(lambda: not any(one.is_running() for one in workers), 30)
    assert not part.lens.exists()
    assert_same_lens(whole, index_in_parts(part, 4, engine=engine, workers=2))


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
    assert_same_lens(whole, part.lens)
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
