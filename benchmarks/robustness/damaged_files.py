"""Files damaged at random, read as users would, and what is wrong with the answers."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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
from prismlm.corpus.documents import Document
from prismlm.explain.audit import read_audit
from prismlm.training.recipe import load_recipe

DAMAGED = "damaged"
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


def run(world: World, reading: Reading) -> str | Finding:
    """Damage a copy and read it as a user would; return "right", "error" or the finding."""
    damaged = world.root / DAMAGED
    if reading.rows is None:
        copy_damaged(world.root / reading.tree, damaged, reading.damage)
    else:
        damaged.mkdir()
        try:
            write_rows(damaged / reading.damage.file, list(reading.rows))
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            shutil.rmtree(damaged)
            reject()  # the format cannot hold these rows
    outcome = judged(str(reading), lambda: _mistake(world, reading, damaged))
    gc.collect(0)
    if changed := world.changes([DAMAGED]):
        return Finding("changes a file that it reads", f"{reading}: {', '.join(changed[:3])}")
    return outcome


def _mistake(world: World, reading: Reading, damaged: Path) -> str | None:
    name = reading.damage.file
    result = read(reading.tree, name, damaged)
    for one in result:
        if isinstance(one, Document):
            named = (one.doc_id, one.text)
            values = (*named, *filter(None, (one.domain, one.license, one.title, one.url)))
            if not all(isinstance(value, str) for value in values):
                return f"{Path(name).suffix}: a document has fields that are not strings"
            for value in values:
                value.encode()
    if reading.rows is None and name.endswith(VERIFIED):
        file = name if reading.tree == "inputs" else ""
        if result != _undamaged(reading.tree, file, world.root / reading.tree):
            return f"another answer for a damaged {Path(name).name}"
    return None


def read(tree: str, file: str, at: Path) -> Any:
    """Return what a tree holds, or of the inputs one file."""
    if tree != "inputs":
        return read_corpus(at) if tree == "corpus" else read_model(at)
    if file == "recipe.yaml":
        return [load_recipe(at / file)]
    return list(read_audit(at / file)[1] if file == "audit.parquet" else read_documents(at / file))


_undamaged = cache(read)


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
