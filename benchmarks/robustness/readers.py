"""Files damaged at random and read as users would, and what is wrong with what is answered."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
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
from benchmarks.robustness.command_line import DAMAGED, files_below
from benchmarks.robustness.damage import ODD_JSON, Damage, copy_damaged, damages
from benchmarks.robustness.world import Finding, World, judged
from prismlm.corpus import Corpus, read_documents
from prismlm.explain.audit import read_audit
from prismlm.training.recipe import load_recipe

TEXTS = (
    "notes.txt", "notes.md", "rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json",
    "rows.csv", "rows.parquet",
)  # fmt: skip
# A checksum or a fingerprint is compared when these are read: what is taken is what was written.
PROVEN = (
    ".gz", "cells.npy", "cell-keys.npy", "cell-starts.npy", "contexts.safetensors",
    "index.parquet", "mass.parquet", "cell-documents.parquet", "prototype_head.safetensors",
    "tokenizer.json",
)  # fmt: skip
ASKED = "The heart is a muscle that"


@dataclass(frozen=True)
class Reading:
    """Something to read.

    Attributes:
        tree: what is copied: a directory of the world.
        damage: to a file of it.
        rows: of a table to be written in its place, or None.
    """

    tree: str
    damage: Damage
    rows: tuple[dict[str, Any], ...] | None = None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" holding {self.rows!r}"[:300]
        return f"{self.tree}: {self.damage}{rows}"


def readings(world: World) -> st.SearchStrategy[Reading]:
    """Draw what to damage: texts, a corpus, a model directory with its lens, a recipe, an audit."""

    def below(tree: str) -> st.SearchStrategy[Reading]:
        return st.builds(Reading, st.just(tree), damages(files_below(world.root / tree)))

    odd = st.sampled_from((*ODD_JSON, "text", "d1", "\u202e", "1503.00990", 1503.0099))
    row = st.dictionaries(st.sampled_from(("id", "text", "domain", "license", "url", "x")), odd)
    whole = st.builds(Damage, st.sampled_from(TEXTS[2:]), st.just("none"), st.just(0), st.just(1))
    rows = st.lists(row, max_size=4).map(tuple)
    written = st.builds(Reading, st.just("inputs"), whole, rows)
    return st.one_of(below("inputs"), below("inputs"), written, below("corpus"), below("model"))


class Readers:
    """Reads a damaged tree as users would; knows what the whole one says."""

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
                reject()  # Arrow cannot even write it: nothing is there to read
        outcome = judged(str(reading), lambda: self._wrong(reading, damaged))
        gc.collect(0)
        changed = self.world.changes([DAMAGED])
        if changed:
            return Finding("changes a file that it reads", f"{reading}: {', '.join(changed[:3])}")
        return outcome

    def _wrong(self, reading: Reading, damaged: Path) -> str | None:
        name = reading.damage.file
        file = damaged / name
        if reading.tree == "inputs" and name == "recipe.yaml":
            load_recipe(file)
        elif reading.tree == "inputs" and name == "audit.parquet":
            list(read_audit(file)[1])
        elif reading.tree == "inputs":
            return self._documents(reading, file)
        elif reading.tree == "corpus":
            return self._same(name, self._corpus, corpus_says(damaged))
        else:
            return self._same(name, self._model, model_says(damaged))
        return None

    def _documents(self, reading: Reading, file: Path) -> str | None:
        documents = list(read_documents(file))
        kind = file.name.partition(".")[2]
        for one in documents:
            known = (one.domain, one.license, one.title, one.url)
            if not isinstance(one.doc_id, str) or not isinstance(one.text, str):
                return f"a document of {kind} whose id or text is no text"
            if any(value is not None and not isinstance(value, str) for value in known):
                return f"what is known of a document of {kind} is no text"
            for value in (one.doc_id, one.text, *known):
                (value or "").encode()
        if reading.rows is None and file.name.endswith(PROVEN):
            return None if documents == self._texts[file.name] else f"other documents of {kind}"
        return None

    def _same(self, name: str, whole: Any, found: Any) -> str | None:
        if not name.endswith(PROVEN) or found == whole:
            return None
        return f"another answer for a damaged {Path(name).name}"

    @cached_property
    def _texts(self) -> dict[str, Any]:
        return {name: list(read_documents(Path("inputs", name))) for name in TEXTS}

    @cached_property
    def _corpus(self) -> Any:
        return corpus_says(Path("corpus"))

    @cached_property
    def _model(self) -> Any:
        return model_says(Path("model"))


def corpus_says(path: Path) -> Any:
    """Return what is read of every part of a corpus."""
    corpus = Corpus.open(path)
    some = range(0, len(corpus), max(1, len(corpus) // 4))
    return (
        [corpus.text(number) for number in some],
        [corpus.spans(number).tolist() for number in some],
        [corpus.column(name) for name in ("doc_id", "source", "domain", "license")],
        int(np.asarray(corpus.tokens(0, corpus.num_tokens)).sum()),
        corpus.split("heldout").tolist(),
    )


def model_says(path: Path) -> Any:
    """Return what a model directory and its lens answer."""
    lm = prismlm.load(path)
    trace = lm.explain(ASKED)
    said = [step.to_dict() for step in trace]
    if lm.lens is None:
        return said
    shares = [trace.sources(by, method=method).to_dict() for by in ("domain", "document")
              for method in ("evidence", "source")]  # fmt: skip
    return said, shares, [one.to_dict() for one in trace.verbatim(3)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows that may be of any kind, in the format that the name says."""
    kind: Callable[[Any], str] = json.dumps
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith(".json"):
        path.write_text(kind(rows))
    elif path.name.endswith(".csv"):
        names = sorted({name for row in rows for name in row})
        lines = [",".join(names), *(",".join(str(r.get(n, "")) for n in names) for r in rows)]
        path.write_text("\n".join(lines), errors="surrogatepass")
    else:
        data = "".join(kind(row) + "\n" for row in rows).encode()
        if path.suffix == ".gz":
            import gzip

            data = gzip.compress(data)
        elif path.suffix == ".zst":
            data = pa.compress(data, "zstd", asbytes=True)
        path.write_bytes(data)
