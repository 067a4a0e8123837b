"""Work in parts: finished parts on disk, and the workers that make them.

A part is a directory that appears complete, by one rename, so a worker that is killed leaves
nothing but its part undone. Engines start the workers, and start them again where they do that:
processes of this machine, Ray (https://docs.ray.io), or datatrove, whose Slurm executor takes the
same callables (docs/clusters.md). Workers share a file system.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import FrameType
from typing import Any, Literal, TypeVar, get_args

from prismlm.errors import InputError, PrismError, check_choice, check_whole
from prismlm.files import discard
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import RUN_FILE, check_same, keeping, read_note, writing

Engine = Literal["local", "ray", "datatrove"]
Step = TypeVar("Step", bound=Any)
ENGINES: tuple[str, ...] = get_args(Engine)
# Makes a part: work(None, number, count), the signature of a step of datatrove. It is pickled.
Work = Callable[[Any, int, int], object]
KILLED = "a worker was killed, perhaps for memory. Finished parts are kept: run it again to resume."


def run_parts(
    work: Work,
    count: int,
    *,
    engine: Engine = "local",
    workers: int = 1,
    gpus: bool = False,
    name: str = "Parts",
    progress: Reporter = SILENT,
) -> None:
    """Make all parts of a job, at most ``workers`` at a time.

    Args:
        work: makes one part, or returns at once if it is finished.
        count: the number of parts.
        engine: what starts the workers. Ray joins the cluster at ``RAY_ADDRESS`` if that is set.
        workers: each has an equal share of this machine's processors, or one of a cluster's. A
            single local one is this process.
        gpus: whether each worker needs a GPU of its own, of those that CUDA_VISIBLE_DEVICES names.
        name: what the parts are called in ``progress``.

    Raises:
        InputError: an unknown engine, or one that is not installed; more workers than parts, or
            than GPUs of this machine.
        PrismError: a worker was killed, or what a worker raised.
    """
    check_workers(count, engine, workers)
    if gpus and workers > len(_devices()) and not _on_cluster(engine):
        raise InputError(
            f"{workers} workers for {len(_devices())} GPU(s): expected a GPU for each. Start fewer "
            "workers, or use --device cpu."
        )
    start = {"local": _local, "ray": _ray, "datatrove": _datatrove}[engine]
    kept = keeping(lambda: "Finished parts are kept.")
    with kept, progress.task(name, count, name.lower()) as task:
        start(work, count, workers, gpus, task)


def check_workers(count: int, engine: str, workers: int) -> None:
    """Raise InputError for an engine or a number of workers that cannot make so many parts."""
    check_choice("the engine", engine, ENGINES)
    if check_whole("the number of workers", workers, 1) > count:
        raise InputError(
            f"{workers} workers for {count} part(s): expected at least one part for each. Split "
            "the work into more parts, or start fewer workers."
        )
    if engine != "local" and find_spec(engine) is None:
        raise InputError(
            f"the engine {engine} is not installed: run `pip install prismlm[{engine}]`, or use "
            "--engine local."
        )


def _devices() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def _on_cluster(engine: str) -> bool:
    return engine == "ray" and "RAY_ADDRESS" in os.environ


def _local(work: Work, count: int, workers: int, gpus: bool, task: Task) -> None:
    if workers == 1:
        for number in range(count):
            work(None, number, count)
            task.advance()
        return
    # Spawned, as a forked process cannot use CUDA.
    context = get_context("spawn")
    names = context.Queue()
    for device in _devices()[:workers] if gpus else [""] * workers:
        names.put(device)
    others = set(active_children())
    with ProcessPoolExecutor(workers, context, _begin, (names, workers)) as pool:
        try:
            # A terminal sends Ctrl-C to all processes: these inherit that it is held back.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                futures = [pool.submit(_make, work, number, count) for number in range(count)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for future in as_completed(futures):
                future.result()
                task.advance()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, Exception):
                for worker in set(active_children()) - others:
                    worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise PrismError(KILLED) from error
            raise


def _make(work: Work, number: int, count: int) -> None:
    """Make a part in this worker, which SIGTERM ends once temporary files are removed."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        work(None, number, count)
    except SystemExit:
        # The pool would start the next part.
        os._exit(1)


def _stop(number: int, frame: FrameType | None) -> None:
    # It comes again when the first worker has ended.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit


def _begin(names: Any, workers: int) -> None:
    """Give this worker its processors, and its GPU."""
    import torch

    if device := names.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(_threads(workers))
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, so that its locks are free."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _threads(workers: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _ray(work: Work, count: int, workers: int, gpus: bool, task: Task) -> None:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util import ActorPool

    class Worker:
        def make(self, number: int) -> None:
            work(None, number, count)

    started, cluster = not ray.is_initialized(), _on_cluster("ray")
    if started:
        # Without "local" it may join a cluster that was started here before.
        where: dict[str, Any] = {"address": "local", "num_cpus": workers * _threads(workers)}
        ray.init(include_dashboard=False, log_to_driver=False, **({} if cluster else where))
    needs: dict[str, Any] = {"num_cpus": 1 if cluster else _threads(workers), "num_gpus": int(gpus)}
    for name, need in (("CPU", needs["num_cpus"]), ("GPU", needs["num_gpus"])):
        present = ray.cluster_resources().get(name, 0)
        if need * workers > present:
            # A cluster may grow; where it does not, this would wait in silence.
            task.note(f"{workers} workers wait for {name}s: the cluster has {present:g} now.")
    try:
        # Ray starts a worker that was killed again, and gives it its part again.
        remote = ray.remote(**needs, max_restarts=3, max_task_retries=3)
        pool = ActorPool([remote(Worker).remote() for _ in range(workers)])
        numbers = list(range(count))
        for _ in pool.map_unordered(lambda actor, number: actor.make.remote(number), numbers):
            task.advance()
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        # It may also have been unable to start, for want of this package.
        why = str(error).strip().splitlines()[-1]
        raise PrismError(f"{KILLED} Ray says: {why}") from error
    finally:
        if started:
            ray.shutdown()


def _datatrove(work: Work, count: int, workers: int, gpus: bool, task: Task) -> None:
    # The pool of its local executor waits in vain for a process that was killed.
    # After an error, other workers may still write their logs.
    with TemporaryDirectory(ignore_cleanup_errors=True) as logs:
        _local(partial(_datatrove_task, work, logs), count, workers, gpus, task)


def _datatrove_task(work: Work, logs: str, data: Any, number: int, count: int) -> None:
    from datatrove.executor import LocalPipelineExecutor

    # What ``run`` calls for each task; a local rank of 1 does not print.
    LocalPipelineExecutor([work], tasks=count, logging_dir=logs)._run_for_rank(number, 1)


def located(step: Step, *names: str) -> Step:
    """Return a step whose paths hold in any directory; names on the hub and addresses stay."""
    paths: dict[str, Path | None] = {name: getattr(step, name) for name in names}
    return replace(step, **{n: p.absolute() for n, p in paths.items() if p and p.exists()})


class Parts:
    """The finished parts of a job, in ``.NAME.partial``, with a ``run.json`` of settings each."""

    def __init__(self, out: Path, count: int) -> None:
        self.out, self.count = out, count
        self.path = out.with_name(f".{out.name}.partial")

    def part(self, number: int) -> Path:
        """Return the directory of a part."""
        return self.path / f"part-{number:05d}-of-{self.count:05d}"

    def complete(self) -> list[int]:
        """Return which parts are finished."""
        return [number for number in range(self.count) if self.part(number).is_dir()]

    def kept(self) -> str:
        """Say what an interrupted run leaves."""
        if any(self.path.glob("[!.]*")):
            return f"Finished parts are kept in {self.path}. Run the same command again to resume."
        return "No part was finished: the same command starts over."

    def check(self, run: dict[str, Any], *, overwrite: bool = False) -> None:
        """Check that finished parts are of the same run; discard others with ``overwrite``."""
        way_out = "Resume that one, choose another output, or discard its parts with --overwrite."
        # Not while another process writes the result.
        with writing(self.path, wait=True):
            for note in self.path.glob(f"[!.]*/{RUN_FILE}"):
                before = read_note(note, self.path)
                if overwrite and before != run:
                    discard(note.parent)
                else:
                    check_same(f"{self.out} was started with another input", before, run, way_out)
