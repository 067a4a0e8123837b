"""A tree of sources runs the scenario; what came of it is kept in a folder and read from there.

The folder holds ``work``, where every command ran and wrote; ``steps.json``, what each said; and
``tree.json``, what ran where. Such a folder stands in for a revision, and nothing is run again.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.structure.renames import Renames
from benchmarks.structure.scenario import Step, first_step, steps, write_inputs

ROOT = Path(__file__).parents[2]
TREE_FILE, STEPS_FILE, WORK = "tree.json", "steps.json", "work"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "typer", "rich")
COLUMNS = 100
# Ids in SVG files are drawn at random without it.
MATPLOTLIB = "svg.hashsalt: the same in every run\n"
PROJECT = "pyproject.toml"
ENTRY = "import sys; from {module} import {function}; sys.argv[0] = 'prismlm'; {function}()"
PROBE = "corpus: none\nout: none\nmodel: {preset: llama-tiny}\nsteps: 1\nunknown: 1\n"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Said:
    """What a command said.

    Attributes:
        group: what it is counted under.
        line: what it is known by.
        exit_code: negative for a signal.
        stdout: all of it.
        error: of stderr, the message that it failed with; progress is not kept.
        seconds: how long it took.
    """

    group: str
    line: str
    exit_code: int
    stdout: str
    error: str
    seconds: float


@dataclass(frozen=True)
class Outputs:
    """What a tree did.

    Attributes:
        tree: what ran where: commit, machine, versions, renames and paths.
        said: of each command line.
        work: the folder that commands wrote to.
    """

    tree: dict[str, Any]
    said: dict[str, Said]
    work: Path


def is_kept(name: str) -> bool:
    """Say whether this is a folder of outputs."""
    return (Path(name) / TREE_FILE).is_file()


def read_outputs(folder: Path) -> Outputs:
    """Return what is kept in a folder."""
    tree = json.loads((folder / TREE_FILE).read_text(encoding="utf-8"))
    said = json.loads((folder / STEPS_FILE).read_text(encoding="utf-8"))
    return Outputs(tree, {one["line"]: Said(**one) for one in said}, folder / WORK)


def run_tree(name: str, folder: Path, declared: Renames, tell: Tell) -> Outputs:
    """Run the scenario on a revision or a checkout.

    Args:
        name: a git revision, or a directory with ``src/prismlm``.
        folder: where outputs are kept; must not hold any.
        declared: renames that the tree may have.
        tell: is given a line on what goes on.
    """
    work = (folder / WORK).resolve()
    if work.exists():
        raise SystemExit(f"{work} is there already: remove it, or choose another --keep.")
    work.mkdir(parents=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made).resolve()
        sources = _sources(name, scratch / "tree") / "src"
        commands = Commands(sources, work, scratch, tell)
        said = [commands.as_installed(first_step())]
        if said[0].exit_code:
            raise SystemExit(f"the demo of {name} failed: {said[0].error}")
        with commands.server() as run:
            renames = _renames(run, scratch / "probe.yaml", declared)
            write_inputs(work, renames.in_recipe)
            said += [run(step) for step in steps(renames.in_arguments)]
    tree = {
        "commit": _commit(name),
        **machine(),
        "renames": {"commands": renames.commands, "recipe_keys": renames.recipe_keys},
        "paths": [str(work), str(sources)],
        "seconds": round(time.monotonic() - began, 1),
    }
    _write_json(folder / STEPS_FILE, [asdict(one) for one in said])
    _write_json(folder / TREE_FILE, tree)
    return read_outputs(folder)


def machine() -> dict[str, Any]:
    """Return what ran a tree; sums are taken in another order on another processor."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


class Commands:
    """Runs command lines of one tree, all in one folder.

    Args:
        sources: the folder that holds the package.
        work: where commands run and write.
        scratch: for what is thrown away.
        tell: is given each line and how long it took.
    """

    def __init__(self, sources: Path, work: Path, scratch: Path, tell: Tell) -> None:
        self._sources, self._work, self._scratch, self._tell = sources, work, scratch, tell
        (scratch / "matplotlibrc").write_text(MATPLOTLIB, encoding="utf-8")
        hidden = ("FORCE_COLOR", "NO_COLOR", "PYTHONHOME", "WORLD_SIZE", "RANK")
        self._environment = {k: v for k, v in os.environ.items() if k not in hidden} | {
            "COLUMNS": str(COLUMNS),
            "HF_HUB_OFFLINE": "1",
            "MATPLOTLIBRC": str(scratch / "matplotlibrc"),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONPATH": str(sources),
            "TERM": "dumb",
        }

    def as_installed(self, step: Step) -> Said:
        """Run a step in a process started for it, by the entry point that pip would install."""
        project = tomllib.loads((self._sources.parent / PROJECT).read_text(encoding="utf-8"))
        module, _, function = project["project"]["scripts"]["prismlm"].partition(":")
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", ENTRY.format(module=module, function=function), *step.arguments],
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        return self._said(step, done.returncode, done.stdout, done.stderr, began)

    @contextmanager
    def server(self) -> Iterator[Callable[[Step], Said]]:
        """Yield what runs a step in a process forked from one that has imported torch."""
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("forking.py"))],
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout
        stdout, stderr = self._scratch / "stdout", self._scratch / "stderr"

        def run(step: Step) -> Said:
            began = time.monotonic()
            streams = {"stdout": str(stdout), "stderr": str(stderr)}
            asked.write(json.dumps({"arguments": step.arguments, **streams}) + "\n")
            asked.flush()
            code = json.loads(answers.readline())
            return self._said(step, code, stdout.read_bytes(), stderr.read_bytes(), began)

        try:
            origin = json.loads(answers.readline())
            if origin is None or not Path(origin).is_relative_to(self._sources):
                raise SystemExit(f"prismlm is imported from {origin}, not from {self._sources}.")
            yield run
        finally:
            asked.close()
            process.wait()

    def _said(self, step: Step, code: int, stdout: bytes, stderr: bytes, began: float) -> Said:
        seconds = round(time.monotonic() - began, 1)
        self._tell(f"{seconds:6.1f} s  exit {code}  {step.line}")
        # Typer's own refusals begin with how the command is used, ours with "error:".
        told = stderr.decode("utf-8", "replace")
        starts = [at for at in map(told.find, ("error: ", "Usage: ", "Traceback ")) if at >= 0]
        error = told[min(starts) :] if code and starts else ""
        text = stdout.decode("utf-8", "replace")
        return Said(step.group, step.line, code, text, error, seconds)


def _renames(run: Callable[[Step], Said], probe: Path, declared: Renames) -> Renames:
    """Ask a tree which of the declared renames it has."""
    probe.write_text(PROBE, encoding="utf-8")

    def ask(*arguments: str) -> Said:
        return run(Step("renames", " ".join(arguments), list(arguments)))

    known = ask("train", str(probe)).error
    return declared.had_by(lambda group: ask(*group.split(), "--help").stdout, known)


def _sources(name: str, tree: Path) -> Path:
    """Copy what a tree installs, so that nobody changes it meanwhile; return where it is."""
    if _is_checkout(name):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(name) / "src", tree / "src", ignore=ignored)
        shutil.copy(Path(name) / PROJECT, tree)
        return tree
    packed = subprocess.run(
        ["git", "archive", name, "src", PROJECT], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    if packed.returncode:
        raise SystemExit(f"{name} is neither a revision, a checkout nor a folder of outputs.")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def _is_checkout(name: str) -> bool:
    return (Path(name) / "src" / "prismlm").is_dir()


def _commit(name: str) -> str:
    """Return the commit of a revision or a checkout, and whether that was changed since."""
    checkout = _is_checkout(name)
    where, revision = (Path(name), "HEAD") if checkout else (ROOT, f"{name}^{{commit}}")
    commit = _git(where, "rev-parse", "--short", revision)
    changed = checkout and _git(where, "status", "--porcelain", "--", "src")
    return f"{commit or 'unknown'}{' and changes' if changed else ''}"


def _git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
