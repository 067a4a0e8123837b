"""A directory of right and odd inputs, and what happened when something was tried in it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import stat
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.robustness.still_true import make_plain
from prismlm.corpus.read import DocumentReader
from prismlm.errors import PrismError
from prismlm.explain.audit import Audit, write_audit
from prismlm.explain.language_model import load
from prismlm.explain.texts import text_options

SECONDS = 30
MEMORY = 6 * 2**30
ROWS = 6
ODD_FILES = {
    "empty.txt": b"",
    "latin.txt": "Zürich".encode("latin1"),
    "binary.jsonl": bytes(range(256)),
    "texts/one.md": b"# One\n\nThe heart is a muscle.\n",
    "texts/two.txt": b"Iron rusts in wet air.\n",
    "odd name ü.txt": b"A name with spaces.\n",
    "round/a.txt": b"A loop.\n",
}
LINKS = {
    "link.txt": "notes.txt", "dangling.txt": "nowhere.txt", "dangling/a.txt": "../nowhere.txt",
    "round/again": "../round",
}  # fmt: skip
# Its estimate trains for a few steps, so that they are small ones.
RECIPE = """corpus: corpus
out: trained
model: {preset: llama-tiny}
head: {prototypes: 32, prototypes_per_token: 4}
data: {length: 64}
steps: 2
batch_size: 2
"""


class TooLong(BaseException):
    """A case did not end in time."""


class Finding(NamedTuple):
    """A case that ended as it should not: ``kind`` is the same for all cases of one fault."""

    kind: str
    example: str


@dataclass
class Tally:
    """How cases ended."""

    right: int = 0
    errors: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])

    @property
    def cases(self) -> int:
        """The number of cases."""
        return self.right + self.errors + len(self.findings)

    def note(self, outcome: str | Finding) -> None:
        """Count a case: "right", "error" or a finding."""
        if isinstance(outcome, Finding):
            self.findings.append(outcome)
        self.right += outcome == "right"
        self.errors += outcome == "error"

    def to_json(self, seconds: float) -> dict[str, Any]:
        """Return the counts, and the shortest example of each kind of finding."""
        examples: dict[str, list[str]] = {}
        for kind, example in self.findings:
            examples.setdefault(kind, []).append(example)
        return {
            "cases": self.cases,
            "seconds": round(seconds, 1),
            "right answers": self.right,
            "errors of ours": self.errors,
            "findings": [
                {"kind": kind, "cases": len(found), "example": min(found, key=len)}
                for kind, found in sorted(examples.items())
            ],
        }


class World:
    """The inputs of all cases, as they were at first; see :meth:`changes`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._origin = root.with_name(f"{root.name}-origin")
        self._origin.mkdir(parents=True)
        make_plain(self._origin)
        _fill(self._origin)
        shutil.copytree(self._origin, root, symlinks=True)
        self._before = self._look()

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Return mode, size and modification time of everything below the root."""
        stats = {str(path.relative_to(self.root)): path.lstat() for path in self.root.rglob("*")}
        return {
            path: (s.st_mode, 0, 0)
            if stat.S_ISDIR(s.st_mode)
            else (s.st_mode, s.st_size, s.st_mtime_ns)
            for path, s in stats.items()
        }

    def changes(self, outputs: Sequence[str] = (), overwrite: bool = False) -> list[str]:
        """Restore everything, and return what changed although it was not named as an output.

        Args:
            outputs: paths that may appear, with files in them and temporary siblings.
            overwrite: whether an output that was there may have changed.
        """
        now, wrong, lost = self._look(), [], False
        for path in sorted(self._before.keys() | now.keys()):
            if self._before.get(path) == now.get(path):
                continue
            named = any(_belongs(path, name) for name in outputs)
            if not named or (path in self._before and not overwrite):
                wrong.append(path)
            if path in self._before:
                lost = True
            else:
                _remove(self.root / path)
        if lost:
            # The folder itself stays: it is the working directory of the cases.
            for path in self.root.iterdir():
                _remove(path)
            shutil.copytree(self._origin, self.root, symlinks=True, dirs_exist_ok=True)
            self._before = self._look()
        return wrong


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _belongs(path: str, name: str) -> bool:
    target, found = Path(os.path.normpath(name)), Path(path)
    if found == target or target in found.parents or found in target.parents:
        return True
    # A lock and temporary siblings carry the name with a dot before it.
    return found.parent == target.parent and found.name.startswith(f".{target.name}")


def _fill(root: Path) -> None:
    shutil.copytree(root / "model", root / "bare", ignore=shutil.ignore_patterns("lens"))
    (root / "recipe.yaml").write_text(RECIPE)
    write_texts(root)
    (root / "inputs").mkdir()
    write_texts(root / "inputs")
    (root / "inputs" / "recipe.yaml").write_text(RECIPE)
    _audit(root / "model", root / "rows.jsonl", root / "inputs" / "audit.parquet")
    for folder in ("texts", "none", "dangling", "round"):
        (root / folder).mkdir()
    for name, data in ODD_FILES.items():
        (root / name).write_bytes(data)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)


def _audit(model: Path, texts: Path, to: Path) -> None:
    lm = load(model)
    found = Audit(lm, text_options([lm]))
    write_audit(found.read(DocumentReader(texts)), [to], found.identity)


def write_texts(root: Path) -> None:
    """Write the same six documents in every format that is read."""
    rows = [
        {
            "id": f"d{number}",
            "text": f"Text {number}: the heart is a muscle; größer 🙂.\nIt beats.",
            "domain": "biology" if number % 2 else None,
            "license": "CC0",
        }
        for number in range(ROWS)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (root / "notes.txt").write_text(rows[0]["text"] or "")
    (root / "notes.md").write_text(rows[0]["text"] or "")
    (root / "rows.jsonl").write_bytes(lines)
    (root / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (root / "rows.json").write_text(json.dumps(rows))
    quoted = [",".join(f'"{row[name] or ""}"' for name in rows[0]) for row in rows]
    (root / "rows.csv").write_text("\n".join(["id,text,domain,license", *quoted]) + "\n")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, root / "rows.parquet")
    with pa.CompressedOutputStream(str(root / "rows.jsonl.zst"), "zstd") as file:
        file.write(lines)


@contextmanager
def bounded(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """End what takes the processor longer with TooLong, and refuse it so much more memory."""

    def end(number: int, frame: object) -> None:
        raise TooLong

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = signal.signal(signal.SIGPROF, end)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, held)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judged(case: str, work: Callable[[], str | None]) -> str | Finding:
    """Run a case; it returns what is wrong with its answer, or None.

    Returns:
        "right", "error" for an error of ours, or the finding.
    """
    try:
        with bounded():
            wrong = work()
    except PrismError as error:
        # An error without words says neither what was wrong nor how to mend it.
        return "error" if len(str(error)) > 20 else Finding(f"says too little: {error}", case)
    except TooLong:
        return Finding("does not end", case)
    except Exception as error:  # what nobody meant to raise is what is looked for
        return Finding(place_of(error), case)
    return "right" if wrong is None else Finding(wrong, case)


def place_of(error: BaseException) -> str:
    """Return the kind of an exception and the innermost function of prismlm that let it through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}prismlm{os.sep}" in frame.filename]
    name = type(error).__name__
    if not own:
        return name
    inside = own[-1].filename.rpartition(f"{os.sep}prismlm{os.sep}")[2]
    return f"{name} in {inside}: {own[-1].name}"
