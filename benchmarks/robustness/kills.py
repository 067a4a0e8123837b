"""Kill commands at random moments, go on, and compare with runs that nothing happened to.

    python -m benchmarks.robustness.kills [--commands corpus train index attach audit]

Each command runs to its end twice; what those two differ in (times and rates in JSON, by their
names) is named and not compared. Then it is killed (SIGKILL to its process group) after random
times, some kills in a row, and started again with the same words until it ends by itself: every
other file has to be the same, byte for byte, and nothing else may lie there. Of a corpus that is
replaced, what stands in its place after each kill has to be whole, the old one or the new. The same
moments are used for Ctrl-C, to see how long it is until the command answers or has ended.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.robustness.commands import (
    COMMANDS,
    ENDED_SECONDS,
    POLL_SECONDS,
    Child,
    Place,
    import_all,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import read_json, write_json

KILLS_IN_A_ROW = 8


Contents = dict[str, tuple[str, int]]


@dataclass
class Tally:
    """What came of the kills of one command."""

    kills: int = 0
    ended_before: int = 0
    rounds: int = 0
    files: int = 0
    bytes: int = 0
    different: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    not_whole: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def contents(directory: Path, without: frozenset[str] = frozenset()) -> Contents:
    """Return digest and size of every file below a directory, by its path.

    Args:
        directory: what to read.
        without: names of values in JSON that do not count.
    """
    found: Contents = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if without and path.suffix in (".json", ".jsonl"):
                data = json.dumps(_pruned(_values(path), without)).encode()
            name = str(path.relative_to(directory))
            found[name] = (hashlib.sha256(data).hexdigest(), len(data))
    return found


def _values(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines()]


def _pruned(value: Any, without: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {k: _pruned(v, without) for k, v in value.items() if k not in without}
    return [_pruned(one, without) for one in value] if isinstance(value, list) else value


def varying(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the values in which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            yield from varying(one[key], other[key], key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            yield from varying(left, right, name)
    elif one != other:
        yield name


class Trial:
    """One command, killed again and again."""

    def __init__(self, place: Place, command: str, seed: int) -> None:
        self.place, self.command = place, command
        self.random = random.Random(f"{seed} {command}")
        self.tally = Tally()
        first, kept = self._straight(0), place.work / "first"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place.made, kept)
        self.seconds = min(first, self._straight(1))
        self.varying = frozenset(
            name
            for path in kept.rglob("*.json*")
            for name in varying(_values(path), _values(place.made / path.relative_to(kept)))
        )
        self.expected = contents(kept, self.varying)
        if contents(place.made, self.varying) != self.expected:
            raise SystemExit(f"{command}: two runs that nothing happened to differ")
        self.old: Path | None = None
        if command == "corpus":
            self.old = place.work / "old"
            shutil.rmtree(self.old, ignore_errors=True)
            shutil.copytree(place.corpus, self.old)

    def _straight(self, number: int) -> float:
        self.place.begin(self.command)
        began = time.monotonic()
        child = Child(self.place.words(self.command), self.place.work)
        if child.wait(ENDED_SECONDS) != 0:
            raise SystemExit(f"{self.command}, run {number}, failed:\n{child.said()}")
        return time.monotonic() - began

    def kill(self, kills: int) -> Tally:
        """Kill the command so often; return what came of it."""
        tally = self.tally
        while tally.kills < kills:
            replaced = self.old if tally.rounds % 2 else None
            self.place.begin(self.command, replace=replaced)
            for _ in range(min(self.random.randint(1, KILLS_IN_A_ROW), kills - tally.kills)):
                if not self._kill_once():
                    break
                if replaced is not None:
                    self._check_whole(replaced)
            self._go_on()
            tally.rounds += 1
        return tally

    def _kill_once(self) -> bool:
        """Start the command and kill it; say whether it was still running."""
        child = Child(self.place.words(self.command), self.place.work)
        code = child.wait(self.random.uniform(0, self.seconds))
        if code is None:
            child.send(signal.SIGKILL)
            code = child.wait(ENDED_SECONDS)
        if code == -signal.SIGKILL:
            self.tally.kills += 1
            return True
        if code != 0:
            self.tally.failed.append(child.said()[-2000:])
        self.tally.ended_before += 1
        return False

    def _go_on(self) -> None:
        child = Child(self.place.words(self.command), self.place.work)
        if child.wait(ENDED_SECONDS) != 0:
            self.tally.failed.append(child.said()[-2000:])
            return
        found = contents(self.place.made, self.varying)
        tally = self.tally
        tally.files += len(self.expected)
        tally.bytes += sum(size for _, size in self.expected.values())
        for name, of in self.expected.items():
            if name not in found:
                tally.missing.append(name)
            elif found[name] != of:
                tally.different.append(name)
        tally.left_behind += sorted(found.keys() - self.expected.keys())

    def _check_whole(self, old: Path) -> None:
        out = self.place.made / "out"
        new = {name.removeprefix("out/"): of for name, of in self.expected.items()}
        # Between its two renames nothing stands there; the next run puts the old one back.
        if out.exists() and contents(out) not in (contents(old), new):
            self.tally.not_whole.append(str(sorted(contents(out))))

    def interrupt(self, signals: int) -> Iterator[float]:
        """Yield, for Ctrl-C at as many moments, the seconds until an answer or the end."""
        sent = 0
        while sent < signals:
            self.place.begin(self.command)
            child = Child(self.place.words(self.command), self.place.work)
            if child.wait(self.random.uniform(0.05, self.seconds)) is not None:
                continue
            sent += 1
            before, began = child.said(), time.monotonic()
            child.send(signal.SIGINT)
            while child.poll() is None and "stopping" not in child.said()[len(before) :]:
                if time.monotonic() - began > ENDED_SECONDS:
                    break
                time.sleep(POLL_SECONDS)
            yield time.monotonic() - began
            if child.wait(ENDED_SECONDS) is None:
                child.send(signal.SIGKILL)
                child.wait(ENDED_SECONDS)


def measure(
    work: Path, commands: list[str], kills: int, signals: int, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each command with what came of so many kills and signals."""
    place = Place(work)
    place.prepare()
    for command in commands:
        trial = Trial(place, command, seed)
        tally = trial.kill(kills)
        answered = list(trial.interrupt(signals))
        found = {
            "seconds": trial.seconds,
            "kills": tally.kills,
            "ended_before": tally.ended_before,
            "rounds": tally.rounds,
            "files_compared": tally.files,
            "bytes_compared": tally.bytes,
            "different": tally.different,
            "missing": tally.missing,
            "left_behind": tally.left_behind,
            "not_whole": tally.not_whole,
            "failed": tally.failed,
            "not_compared": sorted(trial.varying),
            "signals": len(answered),
            "slowest_answer_seconds": max(answered, default=0.0),
            "environment": environment(),
        }
        print(json.dumps({command: found}), flush=True)
        yield command, found


def main() -> None:
    """Measure, and put the figures beside those of the commands that were measured before."""
    parser = script_options(__doc__, RESULTS / "robustness_kills.json")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=40, help="of each command")
    parser.add_argument("--signals", type=int, default=10, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    import_all()
    with TemporaryDirectory() as work:
        for name, found in measure(
            Path(work), given.commands, given.kills, given.signals, given.seed
        ):
            before = read_json(given.out)["commands"] if given.out.is_file() else {}
            whole = before | {name: found}
            ordered = {name: whole[name] for name in COMMANDS if name in whole}
            write_json(given.out, {"seed": given.seed, "commands": ordered})


if __name__ == "__main__":
    main()
