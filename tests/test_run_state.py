"""Long-running work: locks, recorded settings, signals, and calls that signals cannot interrupt."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from prismlm.errors import InputError, Interrupted
from prismlm.run_state import Interrupts, check_same, run_interruptibly, writing


@pytest.mark.parametrize("within", [True, False])
def test_a_second_writer_is_refused(tmp_path, within):
    path = tmp_path / "new"
    with (
        writing(path, within=within),
        pytest.raises(InputError, match=f"written to by another process, {os.getpid()}"),
        writing(path, within=within),
    ):
        pass
    # The lock, and a directory that was created only for it, are removed.
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to"), writing(tmp_path / "file" / "out"):
        pass


def test_writers_that_wait_take_turns(tmp_path):
    active = []

    def take_turn(number):
        with writing(tmp_path / "path", wait=True):
            active.append(number)
            count = len(active)
            active.pop()
            return count

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(take_turn, range(600))) == [1] * 600


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    path = tmp_path / "path"
    for name in ("inner/.model.0123abcd.tmp", ".lens.0123abcd.tmp"):
        (path / name).mkdir(parents=True)
        (path / name / "meta.json").touch()
    (path / ".notes.tmp").touch()
    with writing(path, within=True):
        pass
    assert {file.name for file in path.rglob("*")} == {".notes.tmp", "inner"}


def test_changed_settings_are_listed():
    check_same("it was begun with another recipe", {"a": 1}, {"a": 1}, "")
    changes = r"^it was begun otherwise \(a: 1 → 3; b: 2 → not set; c: not set → 4\)\. Remove it\.$"
    with pytest.raises(InputError, match=changes):
        check_same("it was begun otherwise", {"a": 1, "b": 2}, {"a": 3, "c": 4}, "Remove it.")


@pytest.mark.parametrize(
    ("now", "signals", "code"),
    [
        # In the last step; while everything is saved; and a second one.
        (False, [signal.SIGTERM], 143),
        (True, [signal.SIGTERM], 143),
        (False, [signal.SIGTERM, signal.SIGINT], 130),
    ],
)
def test_a_signal_stops_work_after_its_step_or_at_once(now, signals, code, capfd):
    finished = []

    def work():
        with Interrupts(lambda: "Step 3 is saved.") as interrupts:
            interrupts.now = now
            for number in signals:
                os.kill(os.getpid(), number)
                assert interrupts.received == signal.SIGTERM
                assert "stopping after this step" in capfd.readouterr().err
            finished.append(True)

    with pytest.raises(Interrupted, match="Step 3 is saved") as stop:
        work()
    assert stop.value.exit_code == code
    assert bool(finished) == (not now and len(signals) == 1)


def test_ctrl_c_and_a_time_limit_end_the_wait_for_a_call():
    never = threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(lambda: never.wait(60))
    assert time.monotonic() - began < 2
    with pytest.raises(TimeoutError):
        run_interruptibly(lambda: never.wait(60), 0.1)
    never.set()
    assert run_interruptibly(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 / 0)
