"""Files damaged at random, read as users would, and what is wrong with the answers."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import reject
from hypothesis import strategies as st

import prismlm
from benchmarks.robustness.world import Finding, World, judged
from prismlm.corpus import Corpus, read_documents
from prismlm.explain.audit import read_audit
from prismlm.training.recipe import load_recipe

DAMAGED = "damaged"
TEXTS = (
    "notes.txt", "notes.md", "rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json",
    "rows.csv", "rows.parquet",
)  # fmt: skip
# Files with a checksum or fingerprint: an answer must be that of the undamaged file.
VERIFIED = (
    ".gz", "cells.npy", "cell-keys.npy", "cell-starts.npy", "contexts.safetensors",
    "index.parquet", "mass.parquet", "cell-documents.parquet", "prototype_head.safetensors",
    "tokenizer.json",
)  # fmt: skip
PROMPT = "The heart is a muscle that"
ODD_JSON: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, "x", "", [], {}, [[]], {"a": None}, 2**70, "\ud800",
)  # fmt: skip
REMOVED = "(removed)"
KINDS = ("flip", "cut", "insert", "drop", "zero", "repeat", "empty")


@dataclass(frozen=True)
class Damage:
    """Damage to a file below a copied tree: one of ``KINDS``, or "json".

    ``at`` is where, as a fraction of the bytes or of the values of its JSON, and ``size`` in bytes.
    ``value`` replaces a value of its JSON; ``REMOVED`` deletes it.
    """

    file: str
    kind: str
    at: float
    size: int
    value: Any = None

    def apply(self, path: Path) -> None:
        """Damage a file, but not other hard links to it."""
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(self._json(data) if self.kind == "json" else self._bytes(data))

    def _bytes(self, data: bytes) -> bytes:
        at = int(self.at * len(data))
        end = at + self.size
        before, removed, after = data[:at], data[at:end], data[end:]
        return {
            "flip": before + bytes(byte ^ (1 << self.size % 8) for byte in data[at : at + 1])
            + data[at + 1 :],
            "cut": before,
            "insert": before + bytes(range(self.size % 256)) + data[at:],
            "drop": before + after,
            "zero": before + bytes(len(removed)) + after,
            "repeat": data[:end] + data[at:],
            "empty": b"",
        }[self.kind]  # fmt: skip

    def _json(self, data: bytes) -> bytes:
        value = json.loads(data)
        items = list(_items(value))
        container, key = items[int(self.at * len(items)) % len(items)]
        if self.value == REMOVED:
            del container[key]
        else:
            container[key] = self.value
        return json.dumps(value).encode()


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    # Only the first items of long lists, such as a vocabulary.
    keys = list(value)[:40] if isinstance(value, dict) else range(min(len(value), 5))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _items(value[key])


def damages(files: list[str]) -> st.SearchStrategy[Damage]:
    """Draw damage to one of these files."""

    def to_file(file: str) -> st.SearchStrategy[Damage]:
        at, size = st.floats(0, 1, exclude_max=True), st.integers(1, 200)
        to_bytes = st.builds(Damage, st.just(file), st.sampled_from(KINDS), at, size)
        if not file.endswith(".json"):
            return to_bytes
        value = st.sampled_from((*ODD_JSON, REMOVED, REMOVED))
        return st.builds(Damage, st.just(file), st.just("json"), at, size, value) | to_bytes

    return st.sampled_from(files).flatmap(to_file)


def copy_damaged(tree: Path, to: Path, damage: Damage) -> None:
    """Copy a directory by hard links and damage one file of the copy."""
    shutil.copytree(tree, to, copy_function=os.link)
    damage.apply(to / damage.file)


def files_below(tree: Path) -> list[str]:
    """Return the files of a tree, relative to it."""
    return sorted(str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file())


@dataclass(frozen=True)
class Reading:
    """A directory of the world with a damaged file, or with ``rows`` in place of a table."""

    tree: str
    damage: Damage
    rows: tuple[dict[str, Any], ...] | None = None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" holding {self.rows!r}"[:300]
        return f"{self.tree}: {self.damage}{rows}"


def readings(world: World) -> st.SearchStrategy[Reading]:
    """Draw damage to texts, a recipe, an audit, a corpus, or a model directory with its lens."""

    def below(tree: str) -> st.SearchStrategy[Reading]:
        return st.builds(Reading, st.just(tree), damages(files_below(world.root / tree)))

    value = st.sampled_from((*ODD_JSON, "text", "d1", "\u202e", "1503.00990", 1503.0099))
    row = st.dictionaries(st.sampled_from(("id", "text", "domain", "license", "url", "x")), value)
    table = st.sampled_from(("rows.jsonl", "rows.json", "rows.csv", "rows.parquet"))
    undamaged = st.builds(Damage, table, st.just("none"), st.just(0), st.just(1))
    written = st.builds(Reading, st.just("inputs"), undamaged, st.lists(row, max_size=4).map(tuple))
    return st.one_of(below("inputs"), below("inputs"), written, below("corpus"), below("model"))


class Readers:
    """Reads a damaged tree as users would, and compares with the undamaged one."""

    def __init__(self, world: World) -> None:
        self.world = world
        os.chdir(world.root)

    def run(self, reading: Reading) -> str | Finding:
        """Damage a copy and read it; return "right", "error" or the finding."""
        damaged = self.world.root / DAMAGED
        if reading.rows is None:
            copy_damaged(self.world.root / reading.tree, damaged, reading.damage)
        else:
            damaged.mkdir()
            try:
                write_rows(damaged / reading.damage.file, list(reading.rows))
            except (pa.ArrowException, ValueError, TypeError, OverflowError):
                shutil.rmtree(damaged)
                reject()  # the format cannot hold these rows
        outcome = judged(str(reading), lambda: self._mistake(reading, damaged))
        gc.collect(0)
        if changed := self.world.changes([DAMAGED]):
            return Finding("changes a file that it reads", f"{reading}: {', '.join(changed[:3])}")
        return outcome

    def _mistake(self, reading: Reading, damaged: Path) -> str | None:
        name = reading.damage.file
        if reading.tree == "corpus":
            return self._same(name, self._corpus, read_corpus(damaged))
        if reading.tree == "model":
            return self._same(name, self._model, read_model(damaged))
        if name == "recipe.yaml":
            load_recipe(damaged / name)
        elif name == "audit.parquet":
            list(read_audit(damaged / name)[1])
        else:
            return self._documents(reading, damaged / name)
        return None

    def _documents(self, reading: Reading, file: Path) -> str | None:
        documents = list(read_documents(file))
        extension = file.name.partition(".")[2]
        for document in documents:
            metadata = (document.domain, document.license, document.title, document.url)
            if not isinstance(document.doc_id, str) or not isinstance(document.text, str):
                return f"{extension}: the id or text of a document is not a string"
            if any(value is not None and not isinstance(value, str) for value in metadata):
                return f"{extension}: metadata of a document is not a string"
            for value in (document.doc_id, document.text, *metadata):
                (value or "").encode()
        if reading.rows is None and file.name.endswith(VERIFIED):
            return None if documents == self._texts[file.name] else f"{extension}: other documents"
        return None

    def _same(self, name: str, expected: Any, answer: Any) -> str | None:
        if not name.endswith(VERIFIED) or answer == expected:
            return None
        return f"another answer for a damaged {Path(name).name}"

    @cached_property
    def _texts(self) -> dict[str, Any]:
        return {name: list(read_documents(Path("inputs", name))) for name in TEXTS}

    @cached_property
    def _corpus(self) -> Any:
        return read_corpus(Path("corpus"))

    @cached_property
    def _model(self) -> Any:
        return read_model(Path("model"))


def read_corpus(path: Path) -> Any:
    """Return something of every part of a corpus."""
    corpus = Corpus.open(path)
    some = range(0, len(corpus), max(1, len(corpus) // 4))
    return (
        [corpus.text(number) for number in some],
        [corpus.spans(number).tolist() for number in some],
        [corpus.column(name) for name in ("doc_id", "source", "domain", "license")],
        int(np.asarray(corpus.tokens(0, corpus.num_tokens)).sum()),
        corpus.split("heldout").tolist(),
    )


def read_model(path: Path) -> Any:
    """Return the answers of a model directory and its lens."""
    lm = prismlm.load(path)
    trace = lm.explain(PROMPT)
    steps = [step.to_dict() for step in trace]
    if lm.lens is None:
        return steps
    sources = [
        trace.sources(by, method=method).to_dict()
        for by in ("domain", "document")
        for method in ("evidence", "source")
    ]
    return steps, sources, [span.to_dict() for span in trace.verbatim(3)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with values of any type."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        names = sorted({name for row in rows for name in row})
        lines = [",".join(names), *(",".join(str(r.get(n, "")) for n in names) for r in rows)]
        path.write_text("\n".join(lines), errors="surrogatepass")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
