"""The demo with a real model: SmolLM2, fetched, with the parts that ship with the package.

They are in one archive: an adapter that taught it the bundled question-answer pairs and some of the
bundled texts, a prototype head, and the lens of both. ``benchmarks/attach/demo_model.py`` made it.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

import prismlm
from prismlm import fingerprints
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.demo.fetch import NAME, fetch
from prismlm.demo.prompts import (
    DemoResult,
    check_claim,
    claim,
    explain_prompts,
    parts_there,
)
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.errors import FormatError, InputError
from prismlm.files import WAY_OUT, atomic_directory, read_json, room_to_write, share
from prismlm.lens import layout, suffixes
from prismlm.lens.cells import Cells
from prismlm.models.base import find_base, put_adapted, put_base
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.progress import SILENT, Reporter

SHIPPED = "smollm2.zip"
ADAPTER, LENS = "adapter", "lens"
COST = {
    "corpus": (5.0, 400_000_000, 3_000_000),
    "model": (30.0, 1_800_000_000, 560_000_000),
    "lens": (5.0, 400_000_000, 110_000_000),
}


def run_fetched(out: Path, *, progress: Reporter = SILENT) -> DemoResult:
    """Put the demo's model together where it is not there yet; then explain the prompts.

    Every part is complete or absent: stopped anywhere, the demo goes on from the last whole part.

    Args:
        out: where to build; a directory that the demo made, or a new one.
        progress: shows what is under way.

    Raises:
        Unreachable: the model could not be fetched; nothing was written.
        InputError: ``out`` holds something else, or another demo; gguf is not installed.
        FormatError: what was fetched is not what was published.
        PrismError: the disk is full.
    """
    out = Path(out)
    check_claim(out, identity())
    cached = all(parts_there(out).values())
    if not cached:
        _build(out, progress)
    return explain_prompts(out, chat=True, cached=cached, progress=progress)


def identity() -> dict[str, Any]:
    """Return what the note in the demo's directory says."""
    with as_file(_shipped(SHIPPED)) as archive:
        inputs = fingerprints.of_bytes(
            *(path.read_bytes() for path in (archive, pairs_path(), sample_path()))
        )
    return {"prismlm": prismlm.__version__, "size": "smollm2", "inputs": inputs}


def _shipped(name: str) -> Any:
    return files("prismlm.demo").joinpath("shipped", name)


def _build(out: Path, progress: Reporter) -> None:
    corpus, model, there = out / "corpus", out / "model", parts_there(out)
    # Beside it: nothing of out is claimed before the model has come.
    fetched = out.with_name(f".{out.resolve().name}.fetched")
    shipped = fetched / "shipped"
    if not (model / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise InputError(
                f"{NAME} comes as a GGUF file, and the package gguf, which reads it, is not "
                "installed: pip install 'prismlm[demo]', or use --train."
            )
        gguf = fetch(fetched, progress=progress)
        claim(out, identity())
        with progress.task(f"Opening {NAME}", 2, "steps") as task:
            put_base(find_base(str(gguf)), fetched / "base")
            task.advance()
            _unpack(shipped)
            put_adapted(fetched / "base", shipped / ADAPTER, model)
            task.advance()
    _unpack(shipped)
    if not there["corpus"]:
        sources = [pairs_path(), plain_texts(out / "texts.parquet")]
        build_corpus(sources, corpus, tokenizer=model, progress=progress)
    if not there["lens"]:
        _put_lens(shipped / LENS, model / "lens" / "sample", corpus)
    if not there["model"]:
        with room_to_write(f"the model {model}", model, WAY_OUT):
            shutil.copytree(shipped / ADAPTER, model / ADAPTER, dirs_exist_ok=True)
            for name in (HEAD_FILE, META_FILE):
                (shipped / name).replace(model / name)
    shutil.rmtree(fetched)


def _unpack(into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    room = room_to_write(f"the head and lens of {NAME}", into.parent, WAY_OUT)
    with room, as_file(_shipped(SHIPPED)) as path, zipfile.ZipFile(path) as archive:
        archive.extractall(into)


def _put_lens(shipped: Path, lens: Path, corpus: Path) -> None:
    """Put the lens in its place: with the states of its contexts, and where its corpus is now.

    Raises:
        FormatError: the corpus is not the one it was made of.
    """
    meta = read_json(shipped / layout.META_FILE)
    for name in ("format_version", "prismlm", "digest", "weight", "model"):
        meta.pop(name, None)
    found = Corpus.open(corpus)
    documents = found.split(meta["split"]).tolist()
    tokens = [found.tokens(int(found.starts[i]), int(found.lengths[i])) for i in documents]
    if not np.array_equal(np.concatenate(tokens), np.load(shipped / suffixes.TOKENS_FILE)):
        raise FormatError(
            f"the texts of the demo, in the tokens of {NAME}, are not the ones that its lens was "
            "made of: tokenizers or transformers has changed how it reads them. Use --train, or "
            "the versions in constraints/tested.txt."
        )
    with room_to_write(f"the lens {lens}", lens.parent, WAY_OUT), atomic_directory(lens) as made:
        shutil.copytree(shipped, made, dirs_exist_ok=True)
        contexts = made / layout.CONTEXTS_FILE
        save_file({"states": _context_states(made, meta["cells"])}, str(contexts))
        share(contexts)
        meta |= {"corpus_path": str(corpus.resolve()), "corpus_name": corpus.name}
        meta |= {"corpus": found.fingerprint, "tokenizer": found.meta["tokenizer"]["fingerprint"]}
        files = layout.describe_files(made)
        # Its other files were written anew, and names belong to these.
        names = made / layout.PROTOTYPES_FILE
        layout.write_prototypes(layout.read_table(names, layout.PROTOTYPES_SCHEMA), names, files)
        meta |= {"files": files}
        layout.write_meta(made, layout.LensMeta(**meta))


def _context_states(lens: Path, meta: dict[str, Any]) -> Any:
    """Return the states of the contexts as the cells have them, unit length, bf16 [rows, d].

    They would be half of what ships, and are in the cells already, if in fewer bits.
    """
    cells = Cells(lens, meta)
    table = layout.read_table(lens / layout.INDEX_FILE, layout.INDEX_SCHEMA)
    wanted = table["position"].to_numpy()
    position = cells.positions(0, len(cells))
    order = np.argsort(position)
    rows = order[np.searchsorted(position, wanted, sorter=order)]
    return cells.codes.states(cells.records(rows)).bfloat16()
