"""What two trees did, compared: exit codes, what was printed, and every file, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.structure.renames import Renames
from benchmarks.structure.trees import Outputs

LINES_SHOWN, WIDTH = 3, 160
NOTHING = "(nothing)"
TEXT = (".csv", ".html", ".journal", ".json", ".jsonl", ".md", ".svg", ".txt", ".yaml")
EVENTS = "events.out.tfevents"
# The first that fits says what a file is counted under.
KINDS = (
    ("lens directories", r"(^|/)lens/"),
    ("TensorBoard", rf"/{EVENTS}"),
    ("corpora", r"(^|/)(corpora|corpus|tiny_corpus)/"),
    (
        "loss curves and layer logs",
        r"/(training\.jsonl|trainer_state\.json|routing\.csv|spectra\.(csv|json))$",
    ),
    ("weights", r"\.safetensors$"),
    ("optimisers and generators", r"\.(pt|pth)$"),
    ("Parquet", r"\.parquet$"),
    ("pages and plots", r"\.(html|svg|png|md)$"),
    ("JSON, CSV and the like", r"\.(csv|journal|json|jsonl|txt|yaml)$"),
    ("other files", ""),
)


class Allowed(NamedTuple):
    """What may differ between two runs of one tree.

    Attributes:
        where: expression that is looked for in a command line or the path of a file.
        what: expression of what is left out there; its first group, if any, is kept.
        why: the reason.
    """

    where: str
    what: str
    why: str


class Difference(NamedTuple):
    """A thing that is not the same: a command line or a file, and its first lines that differ."""

    item: str
    lines: list[str]


@dataclass
class Group:
    """Things of one kind that were compared."""

    name: str
    items: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(self, item: str, lines: list[str]) -> None:
        """Count an item; lines say how it differs, if it does."""
        self.items += 1
        if lines:
            self.differences.append(Difference(item, lines))


class Comparison:
    """Compares what two trees did.

    Args:
        before: the one.
        after: the other.
        renames: those that are declared; both sides are read in the old words.
        allowed: what else may differ.
    """

    def __init__(
        self, before: Outputs, after: Outputs, renames: Renames, allowed: Sequence[Allowed]
    ) -> None:
        self._sides = before, after
        self._renames, self._allowed = renames, allowed
        self._paths = [path for side in self._sides for path in side.tree["paths"]]

    def groups(self) -> list[Group]:
        """Return everything that was compared, in the order of the table."""
        return [*self._commands(), *self._files()]

    def plain(self, item: str, text: str) -> str:
        """Return a text without what may differ, in the old words."""
        for path in sorted(self._paths, key=len, reverse=True):
            text = text.replace(path, "PATH")
        for one in self._allowed:
            if re.search(one.where, item):
                keep = r"\1…" if re.compile(one.what).groups else "…"
                text = re.sub(one.what, keep, text, flags=re.MULTILINE)
        return self._renames.undone(text)

    def _commands(self) -> list[Group]:
        codes, errors = Group("exit codes"), Group("messages of failures")
        printed: dict[str, Group] = {}
        before, after = (side.said for side in self._sides)
        for line in {**before, **after}:
            first, second = before.get(line), after.get(line)
            if first is None or second is None:
                codes.add(line, [f"not run {'BEFORE' if first is None else 'AFTER'}"])
                continue
            codes.add(line, unlike(str(first.exit_code), str(second.exit_code)))
            group = printed.setdefault(first.group, Group(f"printed: {first.group}"))
            group.add(line, self._unlike_printed(line, first.stdout, second.stdout))
            if first.error or second.error:
                errors.add(line, self._unlike_printed(line, first.error, second.error))
        return [codes, *printed.values(), errors]

    def _unlike_printed(self, line: str, before: str, after: str) -> list[str]:
        before, after = (self._renames.without_hidden(line, text) for text in (before, after))
        found = unlike(self.plain(line, before), self.plain(line, after))
        if found and line.endswith("--help") and self._renames.move_layout(before, after):
            found = unlike(*map(self._renames.undone_in_letters, (before, after)))
        return found

    def _files(self) -> list[Group]:
        groups = {kind: Group(f"files: {kind}") for kind, _ in KINDS}
        before, after = (files_of(side.work, self._renames) for side in self._sides)
        for item in sorted({**before, **after}):
            kind = next(kind for kind, pattern in KINDS if re.search(pattern, item))
            first, second = before.get(item), after.get(item)
            if first is None or second is None:
                lines = [f"not there {'BEFORE' if first is None else 'AFTER'}"]
            else:
                lines = self._unlike_files(item, first, second)
            groups[kind].add(item, lines)
        return [group for group in groups.values() if group.items]

    def _unlike_files(self, item: str, before: Path, after: Path) -> list[str]:
        first, second = before.read_bytes(), after.read_bytes()
        if first == second:
            return []
        if EVENTS in item:
            return self._unlike_texts(item, events(before), events(after))
        if item.endswith(TEXT):
            # Bytes that are no text are no reason to stop: they are shown as what they are.
            texts = (data.decode("utf-8", "backslashreplace") for data in (first, second))
            return self._unlike_texts(item, *texts)
        if item.endswith(".safetensors"):
            first, second = sorted_header(first), sorted_header(second)
        return unlike_bytes(first, second)

    def _unlike_texts(self, item: str, before: str, after: str) -> list[str]:
        found = unlike(self.plain(item, before), self.plain(item, after))
        if found and self._renames.move_keys(after):
            sides = (self.plain(item, text) for text in (before, after))
            found = unlike(*map(self._renames.undone_in_any_order, sides))
        return found


def files_of(work: Path, renames: Renames) -> dict[str, Path]:
    """Return the files of a run by their path, in the old names, without what names a moment."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        item = path.relative_to(work).as_posix()
        old = renames.old_path(item)
        # A tree that writes both has not renamed one to the other.
        item = item if (work / old).exists() else old
        if path.name.startswith(EVENTS):
            # Its name ends with when, on which machine and in which process it was begun.
            folder = item.rpartition("/")[0]
            number = sum(name.startswith(f"{folder}/{EVENTS}") for name in found)
            item = f"{folder}/{EVENTS} {number}"
        found[item] = path
    return found


def unlike(before: str, after: str) -> list[str]:
    """Return the first lines that differ between two texts, or none."""
    if before == after:
        return []
    shown: list[str] = []
    pairs = zip_longest(before.split("\n"), after.split("\n"), fillvalue=NOTHING)
    for number, (first, second) in enumerate(pairs, 1):
        if first != second:
            start = max(0, same_start(first, second) - WIDTH // 2)
            for sign, line in (("-", first), ("+", second)):
                shown.append(f"{number}{sign} {line[start : start + WIDTH]}")
        if len(shown) == 2 * LINES_SHOWN:
            break
    return shown


def same_start(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Return how many characters, or bytes, two texts begin with alike."""
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def unlike_bytes(before: bytes, after: bytes) -> list[str]:
    """Say where two files of bytes differ first, or return nothing."""
    if before == after:
        return []
    at = same_start(before, after)
    return [f"{len(before):,} and {len(after):,} bytes, the first difference at {at:,}"]


def sorted_header(data: bytes) -> bytes:
    """Return a safetensors file with its notes in order: the library writes them in a random one.

    Nothing else is touched: names, shapes, places and numbers of the tensors stay as they are.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    notes = header.get("__metadata__", {})
    header["__metadata__"] = dict(sorted(notes.items()))
    return json.dumps(header).encode() + data[8 + length :]


def events(path: Path) -> str:
    """Return what a TensorBoard file draws, a line an event, without when it was written."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    lines: list[str] = []
    for event in LegacyEventFileLoader(str(path)).Load():
        event.ClearField("wall_time")
        lines.append(" ".join(str(event).split()))
    return "\n".join(lines)


def differing(groups: Iterable[Group]) -> int:
    """Return how many items differ in all."""
    return sum(len(group.differences) for group in groups)
