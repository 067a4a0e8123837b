"""Parts made by real workers of each engine."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from prismlm.errors import InputError, PrismError
from prismlm.parts import run_parts
from tests.helpers.interrupted import wait_for


def make(directory, data, number, count):
    """Make a part; the first attempt at part 1 is killed if the file ``kill`` is there."""
    if number == 1 and (directory / "kill").exists():
        (directory / "kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2 and (directory / "refuse").exists():
        raise InputError("part 2 is bad")
    (directory / f"part-{number}").write_text(f"{number} of {count} by {os.getpid()}")
    (directory / f"device-{os.environ.get('CUDA_VISIBLE_DEVICES')}").touch()


def run(directory, count, workers=2, **options):
    run_parts(partial(make, directory), count, workers=workers, **options)


@pytest.mark.slow
def test_all_parts_are_made_by_other_processes_whose_errors_are_raised(engine, tmp_path):
    run(tmp_path, 5, engine=engine)
    texts = [(tmp_path / f"part-{number}").read_text().split(" by ") for number in range(5)]
    assert [text for text, _ in texts] == [f"{number} of 5" for number in range(5)]
    assert str(os.getpid()) not in {process for _, process in texts}
    (tmp_path / "refuse").touch()
    with pytest.raises(InputError, match="part 2 is bad"):
        run(tmp_path, 4, engine=engine)


@pytest.mark.slow
def test_a_killed_worker(engine, tmp_path):
    """Ray gives its part to another; with the other engines, the next run makes it."""
    (tmp_path / "kill").touch()
    if engine != "ray":
        with pytest.raises(PrismError, match="run it again to resume"):
            run(tmp_path, 4, engine=engine)
    run(tmp_path, 4, engine=engine)
    assert len(list(tmp_path.glob("part-*"))) == 4


@pytest.mark.slow
def test_a_worker_of_a_cluster_without_the_package(tmp_path):
    ray = pytest.importorskip("ray")
    (tmp_path / "prismlm").mkdir()
    (tmp_path / "prismlm" / "__init__.py").write_text("raise ImportError('nothing here')")
    there = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=there)
    try:
        with pytest.raises(PrismError, match=r"worker was killed.*nothing here"):
            run(tmp_path, 4, engine="ray")
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "datatrove"])
def test_each_worker_has_one_of_the_gpus_that_the_user_chose(engine, tmp_path, monkeypatch):
    if engine != "local":
        pytest.importorskip(engine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    run(tmp_path, 6, engine=engine, gpus=True)
    assert {path.name for path in tmp_path.glob("device-*")} <= {"device-4", "device-5"}


# Workers import it too, and say when; so does each part, which takes long and cleans up.
INTERRUPTED = """
import sys, time
from functools import partial
from pathlib import Path
from prismlm.parts import run_parts

here = Path(sys.argv[1])

def slow(here, data, number, count):
    path = here / f"working-{number}"
    path.touch()
    try:
        time.sleep(60)
    finally:
        path.unlink()

if __name__ == "__main__":
    try:
        run_parts(partial(slow, here), 5, workers=2)
    except KeyboardInterrupt as stop:
        sys.exit(f"interrupted: {stop}")
else:
    (here / "loading").touch()
    time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["loading", "working-1"])
def test_ctrl_c_ends_all_workers_with_one_line(tmp_path, stage):
    """As a terminal sends it: to every process of the group."""
    (tmp_path / "work.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "work.py", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for((tmp_path / stage).exists)
    os.killpg(process.pid, signal.SIGINT)
    # Every process holds the pipe, so that it ends when the last of them has.
    said = process.communicate(timeout=30)[0].strip()
    assert said == "interrupted: Finished parts are kept. Run the same command again to resume."
    assert not list(tmp_path.glob("working-*"))


def test_what_cannot_be_started(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr("prismlm.parts.find_spec", lambda name: None)
    for count, options, error in (
        (2, {"workers": 3}, "3 workers for 2 part"),
        (3, {"workers": 3, "gpus": True}, r"3 workers for 2 GPU\(s\)"),
        (2, {"engine": "dask"}, "the engine"),
        (2, {"engine": "ray"}, r"pip install prismlm\[ray\]"),
    ):
        with pytest.raises(InputError, match=error):
            run(tmp_path, count, **options)
