"""Command lines at random, run in this process, and what is wrong with how they end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import typer
from hypothesis import strategies as st

from benchmarks.robustness.world import Finding, World, judged
from prismlm.errors import PrismError
from prismlm.lens.layout import META_FILE, PROTOTYPES_FILE

MODELS = ("model", "model", "model", "bare", "missing", "notes.txt", "corpus", "none", "")
CORPORA = ("corpus", "corpus", "missing", "model", "rows.jsonl", "none")
TEXTS = (
    "The heart is a muscle", "Iron", "", " ", "\n", "é🙂", "\u202eabc", "a" * 3000, "[bold]x",
    "-1", "\udcff", "%s{}",
)  # fmt: skip
FILES = (
    "rows.jsonl", "notes.txt", "rows.csv", "notes.md", "rows.jsonl.gz", "rows.jsonl.zst",
    "rows.json", "rows.parquet", "empty.txt", "latin.txt", "binary.jsonl", "texts", "none",
    "odd name ü.txt", "link.txt", "dangling.txt", "dangling", "round", "missing.txt", "corpus",
    "model", "/dev/null", "",
)  # fmt: skip
OUTPUTS = (
    "new", "new.html", "new.json", "new.jsonl", "new.csv", "new.parquet", "new.svg",
    "deep/new.html", "rows.csv", "rows.jsonl", "notes.txt", "link.txt", "none", "texts", "model",
    "corpus", "notes.txt/new.html", "", "recipe.yaml",
)  # fmt: skip
NUMBERS = ("1", "2", "3", "0", "-1", "1.5", "nan", "inf", "", "x", "1e3", "9" * 20, "٣", "0.5")
WORDS = (
    "text", "id", "domain", "license", "source", "document", "evidence", "train",
    "heldout", "all", "sample", "cpu", "last", "0:3", "5", "-2:", "1:14", "0:0", "license=CC0",
    "domain=biology", "domain=", "top", "signature", "logit", "json", "x", "", "\udcff", "ü",
)  # fmt: skip
POOLS = {
    "model": MODELS, "model_a": MODELS, "model_b": MODELS, "models": MODELS,
    "corpus": CORPORA, "directory": CORPORA, "text": TEXTS, "prompt": TEXTS,
    "file": FILES, "files": FILES, "inputs": FILES, "audit": FILES, "cases": FILES,
    "recipe": ("recipe.yaml", "recipe.yaml", *FILES), "tokenizer": ("model", *FILES),
    "set": ("steps=1", "steps=x", "bogus=1", "model.preset=x", "head.prototypes=8", "=", "a.b"),
    "out": OUTPUTS, "html": OUTPUTS, "parquet": OUTPUTS, "jsonl": OUTPUTS, "csv": OUTPUTS,
    "write": OUTPUTS, "keep_states": OUTPUTS, "dataset": FILES, "data_files": FILES,
    "lens": ("sample", "model/lens/sample", "missing", ""), "arguments": ("run",),
    "lens_a": ("sample", "x"), "lens_b": ("sample", "x"), "data": FILES, "beside": MODELS,
    "vocab_size": ("300", "400", *NUMBERS), "doc": ("arxiv:0", *WORDS),
    "edit": ("notes.txt", "rows.json", "none", "x"),
}  # fmt: skip
WRITES = {"out", "html", "parquet", "jsonl", "csv", "write", "keep_states"}
# What would compute for minutes is estimated; the rest of its checks come first.
ONLY_ESTIMATED = {"train", "attach", "index"}
# What reads much by default reads little here.
LITTLE = {
    "themes": ("--units", "2"),
    "attach": ("--prototypes", "32", "--prototypes-per-token", "4", "--window", "64"),
}
# An estimate that trains to measure how fast that is, one that compiles for long, servers, and
# studies that compute for minutes.
STUDIES = {"suite", "glue", "judge", "robustness", "clamping"}
LEFT_OUT = {"demo", "map", "explore", "serve"} | STUDIES
# Written into the model's lens by the command that names its prototypes.
LABELS = tuple(f"model/lens/sample/{name}" for name in (META_FILE, PROTOTYPES_FILE))
# Drawn twice as often: most of what a user does.
OFTEN = {"explain", "audit", "sources", "steer", "generate", "build"}
USUAL = 3
ODD_TEXTS = st.text(st.characters(exclude_characters="\x00/.~", exclude_categories=()), max_size=8)


class CommandLine(NamedTuple):
    """What follows ``prismlm``, and the values of options that name what is written."""

    argv: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "prismlm " + " ".join(map(repr, self.argv))


@cache
def command() -> Any:
    """Return the whole command line, built once."""
    from prismlm.cli.app import app

    return typer.main.get_command(app)


@cache
def _commands() -> list[tuple[tuple[str, ...], Any]]:
    def walk(one: Any, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
        below = getattr(one, "commands", None)
        if below is None:
            return [(names, one)]
        return [command for name, sub in below.items() for command in walk(sub, (*names, name))]

    commands = [one for one in walk(command(), ()) if one[0][0] not in LEFT_OUT]
    return commands + [one for one in commands if one[0][0] in OFTEN or one[0][-1] in OFTEN]


@st.composite
def command_lines(draw: Any) -> CommandLine:
    """Draw a command with arguments and options, right ones and others."""
    names, chosen = draw(st.sampled_from(_commands()))
    argv, outputs = [*names, *LITTLE.get(names[-1], ())], []
    arguments = [one for one in chosen.params if one.param_type_name == "argument"]
    options = [one for one in chosen.params if one.param_type_name == "option"]
    for one in arguments:
        count = draw(st.integers(0, 2)) if one.nargs == -1 else 1
        if one.required or draw(st.booleans()):
            argv += [_value(draw, one.name) for _ in range(count)]
    needed = [one for one in options if one.required and draw(st.integers(0, 9))]
    others = draw(st.lists(st.sampled_from(options), max_size=3, unique_by=id)) if options else []
    for one in {id(one): one for one in (*needed, *others)}.values():
        if one.name == "dry_run" and names[-1] in ONLY_ESTIMATED:
            continue
        argv.append(one.opts[0])
        if not one.is_flag:
            value = _value(draw, one.name)
            argv.append(value)
            if one.name in WRITES:
                outputs.append(value)
    if names[-1] in ONLY_ESTIMATED:
        argv.append("--dry-run")
    return CommandLine(tuple(argv), tuple(outputs))


def _value(draw: Any, name: str) -> str:
    pool = POOLS.get(name) or (WORDS if draw(st.booleans()) else NUMBERS)
    if draw(st.integers(0, 19)) == 0:
        return draw(ODD_TEXTS)
    # The first ones are what a user means.
    return draw(st.sampled_from(pool[:USUAL] if draw(st.booleans()) else pool))


def run(world: World, line: CommandLine) -> str | Finding:
    """Run a command line; return "right", "error" or the finding."""
    os.chdir(world.root)
    outcome = judged(str(line), lambda: _run(line))
    changed = world.changes(line.outputs, "--overwrite" in line.argv)
    if line.argv[0] == "label":
        changed = [path for path in changed if path not in LABELS]
    if changed:
        return Finding("changes a file that was not named", f"{line}: {', '.join(changed[:3])}")
    return outcome


def _run(line: CommandLine) -> str | None:
    """Run a command; raise its error, or return what is wrong with its answer."""
    code, out, errors = invoke(list(line.argv))
    if code == 0:
        return _wrong(line, out)
    if code in (1, 2) and ("error: " in errors or "Usage: " in errors):
        raise PrismError(errors)
    return f"exit code {code} without an error of ours"


def invoke(argv: list[str]) -> tuple[int, str, str]:
    """Run a command line in this process; return the exit code, and what it printed."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    held, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b""))
    code: Any = 0
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                command().main(args=argv, prog_name="prismlm")
            except SystemExit as stop:
                code = stop.code or 0
    finally:
        sys.stdin = held
    for stream in streams:
        stream.flush()
    texts = [stream.buffer.getvalue().decode() for stream in streams]  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def _wrong(line: CommandLine, out: str) -> str | None:
    name = line.argv[0]
    if "--json" in line.argv and "--help" not in line.argv:
        try:
            json.loads(out, parse_constant=_no_constant)
        except ValueError:
            return f"{name} --json prints no JSON document"
    for path in map(Path, line.outputs):
        if name in ("explain", "audit", "compare") and not _readable(path):
            return f"{name} wrote {path.suffix} that cannot be read"
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _readable(path: Path) -> bool:
    if path.suffix == ".parquet":
        return pq.ParquetFile(path).metadata.num_columns > 0
    if path.suffix == ".html":
        return path.read_text().lower().startswith("<!doctype")
    return path.exists()
