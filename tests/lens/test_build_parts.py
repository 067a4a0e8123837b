"""An index by real workers of each engine equals that of one process."""

import os
import pickle
import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest

from prismlm.errors import InputError, PrismError
from prismlm.lens.build import IndexPart, index, index_in_parts
from prismlm.lens.layout import read_meta
from prismlm.lens.options import IndexOptions
from prismlm.parts import Parts
from tests.lens.test_build import assert_same_lens

OPTIONS = IndexOptions(contexts=4, window=32, positions=0.5)
RANGES = replace(OPTIONS, range_bytes=300_000)


@pytest.fixture(scope="module")
def straight(tiny_model, tiny_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "lens"
    return index(tiny_model, tiny_corpus, out, OPTIONS, device="cpu")


@pytest.fixture
def part(tiny_model, tiny_corpus, tmp_path):
    return IndexPart(tiny_model, tiny_corpus, tmp_path / "lens", OPTIONS, "cpu")


def test_parts_give_the_lens_of_one_and_finished_ones_are_not_read_again(part, straight):
    replace(part, merge=False)(None, 2, 3)
    finished = Parts(part.lens, 3).part(2)
    before = finished.stat().st_mtime_ns
    replace(part, merge=False)(None, 2, 3)
    part(None, 0, 3)
    assert finished.stat().st_mtime_ns == before
    assert_same_lens(straight, index_in_parts(part, 3))
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
    for number in (0, 1):  # with other options
        replace(part, merge=False, overwrite=True)(None, number, 3)
    index_in_parts(replace(part, overwrite=True, options=replace(OPTIONS, contexts=2)), 3)
    assert read_meta(part.lens).contexts == 2
    with pytest.raises(InputError, match="exists"):
        index_in_parts(part, 3)


@pytest.fixture(scope="module")
def in_ranges(tiny_model, tiny_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranges") / "lens"
    return index(tiny_model, tiny_corpus, out, RANGES, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray", "datatrove"])
def test_workers_of_each_engine_give_the_lens_of_one(part, in_ranges, engine, monkeypatch):
    if engine != "local":
        pytest.importorskip(engine)
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
        replace(assembly)(None, number, 2)
    assert assembly.finished()
    with patch("prismlm.lens.assembly.write_range", pytest.fail):
        part(None, 0, 3)
    assert_same_lens(in_ranges, part.lens)
    # Another process may have written the lens, and removed the parts.
    assert replace(assembly).jobs == []
    replace(assembly)(None, 0, 2)
    with pytest.raises(InputError, match="0 of 3 parts"):
        replace(assembly, lens=part.lens.with_name("other"))(None, 0, 2)


def drive(part):
    """Index as a command of its own does, in a process group of its own."""
    os.setsid()
    index_in_parts(part, 4, workers=2)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["part", "cells"])
@pytest.mark.parametrize("who", ["worker", "driver"])
def test_the_same_command_after_a_kill(part, in_ranges, stage, who):
    """Finished parts are kept, whoever is killed; workers do not outlive who started them."""
    part = replace(part, options=RANGES)
    driver = get_context("spawn").Process(target=drive, args=(part,))
    driver.start()
    assert driver.pid is not None
    partial = Parts(part.lens, 4).path
    wait_for(lambda: list(partial.glob(f"{stage}-*")))
    workers = [child for child in children(driver.pid) if "spawn_main" in child[1]]
    assert len(workers) == 2
    os.kill(driver.pid if who == "driver" else workers[0][0], signal.SIGKILL)
    driver.join(60)
    assert driver.exitcode
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid, _ in workers), 30)
    before = {path: path.stat().st_mtime_ns for path in partial.glob("[!.]*")}
    assert any(path.name.startswith(stage) for path in before)
    assert not part.lens.exists()
    written = []
    with patch("prismlm.lens.build.discard", lambda path: written.extend(path.glob("[!.]*"))):
        index_in_parts(part, 4, workers=2)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(written) > len(before)
    assert_same_lens(in_ranges, part.lens)


def children(parent):
    """Return ids and command lines of the processes that a process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (path / "status").read_text(encoding="utf-8")
            if f"PPid:\t{parent}\n" in status:
                found.append((int(path.name), (path / "cmdline").read_text(encoding="utf-8")))
    return found


@pytest.mark.slow
def test_two_commands_on_one_lens(part, in_ranges):
    """The second makes what the first does not, or waits; one of them writes the lens.

    The other may find it written, which it says.
    """
    part = replace(part, options=RANGES)
    both = [get_context("spawn").Process(target=drive, args=(part,)) for _ in range(2)]
    for driver in both:
        driver.start()
    for driver in both:
        driver.join(300)
    assert 0 in [driver.exitcode for driver in both]
    assert_same_lens(in_ranges, part.lens)
    assert [path.name for path in part.lens.parent.iterdir()] == ["lens"]
