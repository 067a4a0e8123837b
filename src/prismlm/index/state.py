"""The state of an index under way, in a hidden directory beside the lens: what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prismlm import fingerprints
from prismlm.errors import FormatError, InputError
from prismlm.files import (
    atomic_file,
    discard,
    json_text,
    remove_left_behind,
    room_to_write,
    write_json,
)
from prismlm.index.mass import MassCounter
from prismlm.index.scan import Scan
from prismlm.index.spool import Run, Spool
from prismlm.ops.top_contexts import TopContexts
from prismlm.run_state import Held, busy, check_same, locked, read_note

RUN_FILE = "run.json"
RUN_LOCK = "run.lock"
BEGIN_LOCK = "begin.lock"
LENS = "lens"
FINISHED = "finished"
FORMAT_VERSION = 2
GO_ON = "Run the same command again to resume."


class Partial:
    """The directory ``.NAME.partial`` beside a lens that is being written.

    ``run.json`` says what of; ``shard-I-of-N.safetensors`` holds what shard I has found, and the
    file ``.positions`` beside it what goes to the cells; ``lens`` is the lens while its files are
    written; ``finished`` says that all of them are.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f".{out.name}.partial")

    def begin(self, run: dict[str, Any], *, overwrite: bool) -> None:
        """Note what is indexed, or check that it is what was begun here.

        Raises:
            InputError: something else was begun and is not to be discarded, or is still going on.
        """
        remove_left_behind(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / BEGIN_LOCK, wait=True):
            if (self.path / RUN_FILE).is_file():
                if self.matches(run):
                    return
                if not overwrite:
                    check_same(
                        f"an index of {self.out} was begun with another input",
                        self._run(),
                        run,
                        "Resume that one, choose another --lens, or discard what was scanned "
                        "with --overwrite.",
                    )
                self._discard()
                self.path.mkdir()
            write_json(self.path / RUN_FILE, {"format_version": FORMAT_VERSION, **run})

    def matches(self, run: dict[str, Any]) -> bool:
        """Say whether this is the run that was begun here."""
        return (self.path / RUN_FILE).is_file() and self._run() == run

    def _run(self) -> dict[str, Any]:
        noted = read_note(self.path / RUN_FILE, self.path, format_version=FORMAT_VERSION)
        return {key: value for key, value in noted.items() if key != "format_version"}

    def _discard(self) -> None:
        try:
            with locked(self.path / RUN_LOCK):
                discard(self.path)
        except Held as held:
            raise self._busy(held) from None

    def _busy(self, held: Held) -> InputError:
        noted = (path.read_text(errors="replace") for path in self.path.glob("shard-*.lock"))
        return busy(self.out, held.process or ", ".join(text.strip() for text in noted))

    @contextmanager
    def working(self, shard: int, shards: int) -> Iterator[None]:
        """Keep other processes from the same shard, and from discarding any, during the block.

        Raises:
            InputError: another process works on it.
        """
        name = self._state(shard, shards).with_suffix(".lock")
        try:
            with locked(self.path / RUN_LOCK, shared=True), locked(name):
                remove_left_behind(self._state(shard, shards))
                yield
        except Held as held:
            raise self._busy(held) from None

    # -- what was found

    def _state(self, shard: int, shards: int) -> Path:
        return self.path / f"shard-{shard:05d}-of-{shards:05d}.safetensors"

    def spool(self, shard: int, shards: int, width: int, runs: Iterable[Iterable[int]]) -> Spool:
        """Return the file of a shard's positions, known to hold these runs."""
        path = self._state(shard, shards).with_suffix(".positions")
        return Spool(path, width, [Run(*run) for run in runs])

    def save(self, scan: Scan, shard: int, shards: int, *, complete: bool) -> None:
        """Write what a shard has found; it replaces what the shard had before.

        Raises:
            PrismError: the disk is full or failing; what was saved before is still there.
        """
        scan.settle()
        if scan.spool is not None:
            with self.writing("what was scanned"):
                scan.spool.flush()
        keys = list(scan.mass.rows)
        tensors = {
            **{f"top.{name}": column for name, column in scan.top._asdict().items()},
            "mass": torch.stack(list(scan.mass.rows.values()))
            if keys
            else torch.zeros(0, 2, scan.mass.prototypes, dtype=torch.int64),
            "curve.tokens": scan.curve_tokens,
            "curve.nearest": scan.curve_nearest,
        }
        state = {
            "slot": scan.slot,
            "passes": scan.passes,
            "tokens": scan.tokens,
            "groups": [list(key) for key in keys],
            "runs": None if scan.spool is None else [list(run) for run in scan.spool.runs],
            "complete": complete,
            "digest": _digest(tensors),
        }
        path = self._state(shard, shards)
        with self.writing("what was scanned"), atomic_file(path) as temporary:
            save_file(tensors, str(temporary), metadata={"state": json_text(state)})
            _flush(temporary)

    def load(self, shard: int, shards: int) -> Scan | None:
        """Return what a shard has found so far, or None where it has not begun.

        Raises:
            FormatError: the file is damaged.
        """
        path = self._state(shard, shards)
        if not path.is_file():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                state = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _digest(tensors) != state["digest"]:
                raise _damaged(path, "its contents are not what was written")
            top = TopContexts(*(tensors[f"top.{name}"] for name in TopContexts._fields))
            mass, width = MassCounter(top.cosine.shape[0]), top.state.shape[-1]
            keys = (tuple(key) for key in state["groups"])
            mass.merge(dict(zip(keys, tensors["mass"], strict=True)))
            return Scan(
                top,
                mass,
                tensors["curve.tokens"],
                tensors["curve.nearest"],
                state["slot"],
                state["passes"],
                state["tokens"],
                None if state["runs"] is None else self.spool(shard, shards, width, state["runs"]),
            )
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error

    def complete(self, shards: int) -> list[int]:
        """Return which shards are done.

        Raises:
            FormatError: a file is damaged.
        """
        done: list[int] = []
        for shard in range(shards):
            path = self._state(shard, shards)
            try:
                with safe_open(str(path), framework="pt") as file:
                    if json.loads(file.metadata()["state"])["complete"]:
                        done.append(shard)
            except FileNotFoundError:  # not begun, so not done
                continue
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise _damaged(path, error) from error
        return done

    # -- the lens

    @contextmanager
    def finishing(self) -> Iterator[bool]:
        """Wait until no shard is worked on; yield whether there is still something to finish."""
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.path / RUN_LOCK, wait=True))
            except FileNotFoundError:
                # Another process has put the lens in its place.
                yield False
                return
            yield (self.path / RUN_FILE).is_file()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty directory for the files of the lens; then put it in its place.

        Raises:
            PrismError: the disk is full or failing.
        """
        directory = self.path / LENS
        with self.writing("the lens"):
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir()
            try:
                yield directory
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            for path in directory.iterdir():
                _flush(path)
            (self.path / FINISHED).touch()
            self.publish()

    def finished(self) -> bool:
        """Say whether the files of the lens are whole, so that it only has to be put in place."""
        return (self.path / FINISHED).is_file()

    def publish(self) -> None:
        """Put a finished lens in its place, if a kill left that undone, and remove the rest."""
        if not self.finished():
            return
        written = self.path / LENS
        if written.exists():
            if self.out.exists():
                os.rename(self.out, self.path / f"replaced-{uuid.uuid4().hex[:8]}")
            os.rename(written, self.out)
        discard(self.path)

    @contextmanager
    def leaving_nothing_useless(self) -> Iterator[None]:
        """Remove the directory if the block fails before anything was saved in it."""
        try:
            yield
        except BaseException:
            with suppress(OSError, Held), locked(self.path / RUN_LOCK):
                if not any(self.path.glob("shard-*.safetensors")):
                    discard(self.path)
            raise

    def writing(self, what: str) -> AbstractContextManager[None]:
        """Turn a disk that is full, or fails, into an error that says what is left."""
        return room_to_write(
            f"{what} of {self.out}", self.path, lambda: f"Make room. {self.rest()}"
        )

    def rest(self) -> str:
        """Say in a sentence what an interrupted run has left."""
        if any(self.path.glob("shard-*.safetensors")):
            return f"What was scanned until the last save is kept in {self.path}. {GO_ON}"
        return f"Nothing was saved before. {GO_ON}"


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    return fingerprints.of_json({name: fingerprints.of_tensor(t) for name, t in tensors.items()})


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, why: object) -> FormatError:
    return FormatError(
        f"{path} is damaged ({why}). Delete it, and the same command scans this part anew."
    )
