"""Long work on one place: locks, what it was begun with, signals, and calls that hide them."""

import os
import signal
import threading
import time

import pytest

from prismlm.errors import InputError, Interrupted
from prismlm.run_state import Interrupts, answering, check_same, writing


@pytest.fixture(autouse=True)
def python_s_own_handler():
    """A shell may have started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("within", [True, False])
def test_a_second_writer_is_told_of_the_first(tmp_path, within):
    place = tmp_path / "new" / "place"
    with writing(place, within=within):
        with (
            pytest.raises(InputError, match=f"written to by another process, {os.getpid()}"),
            writing(place, within=within),
        ):
            pass
        assert len(list((tmp_path / "new").rglob(".*lock"))) == 1
    # What was made for the lock alone is gone, and so is the lock.
    assert list(tmp_path.rglob(".*")) == []
    assert not place.exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write to"), writing(tmp_path / "file" / "out"):
        pass


def test_writers_that_come_at_once_take_turns(tmp_path):
    inside, most, failed = [], [], []

    def turns():
        try:
            for _ in range(100):
                with writing(tmp_path / "place", wait=True):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
        except InputError as error:
            failed.append(error)

    threads = [threading.Thread(target=turns) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert most == [1] * 600


def test_what_a_kill_left_is_removed_and_nothing_else(tmp_path):
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / ".model.0123abcd.tmp").mkdir()
    (place / "inner" / ".model.0123abcd.tmp" / "half").touch()
    (place / ".notes.tmp").touch()
    aside = place / ".lens.0123abcd.old"
    aside.mkdir()
    (aside / "meta.json").touch()
    with writing(place, within=True):
        pass
    kept = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    assert kept == [".notes.tmp", "inner", "lens", "lens/meta.json"]


def test_work_goes_on_only_with_what_it_was_begun_with():
    check_same("it was begun with another recipe", {"a": 1}, {"a": 1}, "")
    with pytest.raises(InputError) as error:
        check_same("it was begun otherwise", {"a": 1, "b": 2}, {"a": 3, "c": 4}, "Remove it.")
    assert str(error.value) == (
        "it was begun otherwise (a: 1 → 3; b: 2 → not set; c: not set → 4). Remove it."
    )


def test_a_signal_is_answered_at_once_and_a_second_one_ends_the_work(capfd):
    def work():
        with Interrupts(lambda: "Step 3 is saved.") as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received == signal.SIGTERM
            assert "stopping after this step" in capfd.readouterr().err
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second one ends the work")

    with pytest.raises(Interrupted, match="Step 3 is saved") as stop:
        work()
    assert stop.value.exit_code == 130


@pytest.mark.parametrize("now", [True, False])
def test_a_signal_after_the_last_save_or_in_the_last_step_is_not_lost(now):
    ended = []

    def work():
        with Interrupts() as interrupts:
            interrupts.now = now
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append(True)

    with pytest.raises(Interrupted) as stop:
        work()
    assert bool(ended) != now
    assert stop.value.exit_code == 143


def test_ctrl_c_leaves_a_call_behind_that_no_signal_ends():
    never = threading.Event()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        answering(lambda: never.wait(60))
    assert time.monotonic() - began < 2
    with pytest.raises(TimeoutError):
        answering(lambda: never.wait(60), 0.1)
    never.set()


def test_what_a_call_returns_or_raises_comes_through():
    assert answering(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        answering(lambda: 1 / 0)
