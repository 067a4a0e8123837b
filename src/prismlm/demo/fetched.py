"""The demo with a real model: SmolLM2 from the package index, and what ships for it with prismlm.

One archive, which ``benchmarks/attach/demo_model.py`` writes, holds an adapter fine-tuned on the
bundled question-answer pairs and some of the bundled texts, a prototype head, and a lens.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.demo.fetch import NAME, fetch
from prismlm.demo.prompts import (
    DemoResult,
    check_claim,
    claim,
    explain_prompts,
    identity,
    parts_there,
)
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.errors import FormatError, InputError
from prismlm.files import (
    WAY_OUT,
    atomic_directory,
    read_json,
    remove_left_behind,
    room_to_write,
)
from prismlm.lens import layout, suffixes
from prismlm.models.base import find_base, put_adapted, put_base
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

SHIPPED = "smollm2.zip"
ADAPTER, LENS = "adapter", "lens"


def run_fetched(out: Path, *, progress: Reporter = SILENT) -> DemoResult:
    """Build the demo's model in ``out``, unless it is there; then explain the prompts.

    Every part is complete or absent: an interrupted demo resumes with the first missing part.

    Raises:
        Unreachable: the model could not be fetched; nothing was written.
        InputError: ``out`` holds something else, or another demo; gguf is not installed.
        FormatError: the fetched model is not the published one, or the texts are tokenized
            differently than for the lens.
        PrismError: the disk is full.
    """
    inputs = (path.read_bytes() for path in (_archive(), pairs_path(), sample_path()))
    note = identity("smollm2", *inputs)
    check_claim(out, note)
    cached = all(parts_there(out).values())
    # A sibling, on the disk of ``out``, which is not touched before the model is fetched.
    work = out.resolve().with_name(f".{out.resolve().name}.fetched")
    if not cached:
        with writing(out):
            for directory in (out, out / "model", work):
                remove_left_behind(directory, within=True)
            _build(out, work, note, progress)
    shutil.rmtree(work, ignore_errors=True)
    return explain_prompts(out, chat=True, cached=cached, progress=progress)


def _archive() -> Traversable:
    return files("prismlm.demo").joinpath("shipped", SHIPPED)


def _build(out: Path, work: Path, note: dict[str, Any], progress: Reporter) -> None:
    corpus, model, there = out / "corpus", out / "model", parts_there(out)
    unpacked = work / "shipped"
    # The weights may be there without the head, which completes the model.
    if (model / "config.json").is_file():
        _unpack(unpacked)
    else:
        if importlib.util.find_spec("gguf") is None:
            raise InputError(
                f"{NAME} comes as a GGUF file, and the package gguf, which reads it, is not "
                "installed: pip install 'prismlm[demo]', or use --train."
            )
        gguf = fetch(work, progress=progress)
        claim(out, note)
        with progress.task(f"Opening {NAME}", 2, "steps") as task:
            put_base(find_base(str(gguf)), work / "base")
            task.advance()
            _unpack(unpacked)
            put_adapted(work / "base", unpacked / ADAPTER, model)
            task.advance()
    if not there["corpus"]:
        sources = [pairs_path(), plain_texts(out / "texts.parquet")]
        build_corpus(sources, corpus, tokenizer=model, progress=progress)
    if not there["lens"]:
        _put_lens(unpacked / LENS, model / "lens" / "sample", corpus)
    if not there["model"]:
        with room_to_write(f"the model {model}", model, WAY_OUT):
            shutil.copytree(unpacked / ADAPTER, model / ADAPTER, dirs_exist_ok=True)
            for name in (HEAD_FILE, META_FILE):
                (unpacked / name).replace(model / name)


def _unpack(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    room = room_to_write(f"the head and lens of {NAME}", directory.parent, WAY_OUT)
    with room, _archive().open("rb") as file, zipfile.ZipFile(file) as archive:
        archive.extractall(directory)


def _put_lens(unpacked: Path, lens: Path, corpus_path: Path) -> None:
    """Write the lens, with its corpus, which must have the tokens that the lens was built from."""
    # Not read_meta: the archive's record lacks the path of the corpus, so its digest is stale.
    meta = read_json(unpacked / layout.META_FILE)
    for name in ("format_version", "prismlm", "digest"):
        del meta[name]
    corpus = Corpus.open(corpus_path)
    documents = corpus.split(meta["split"]).tolist()
    tokens = [corpus.tokens(int(corpus.starts[i]), int(corpus.lengths[i])) for i in documents]
    if not np.array_equal(np.concatenate(tokens), np.load(unpacked / suffixes.TOKENS_FILE)):
        raise FormatError(
            f"the texts of the demo, in the tokens of {NAME}, are not the ones that its lens was "
            "made of: tokenizers or transformers has changed how it reads them. Use --train, or "
            "the versions in constraints/tested.txt."
        )
    with room_to_write(f"the lens {lens}", lens.parent, WAY_OUT), atomic_directory(lens) as made:
        shutil.copytree(unpacked, made, dirs_exist_ok=True)
        meta |= {"corpus_path": str(corpus_path.resolve()), "corpus_name": corpus_path.name}
        meta |= {"corpus": corpus.fingerprint, "tokenizer": corpus.meta["tokenizer"]["fingerprint"]}
        meta["files"] = layout.describe_files(made)
        # It holds a key of the other files, which were one more where the archive was made.
        path = made / layout.PROTOTYPES_FILE
        prototypes = layout.read_table(path)
        layout.write_prototypes(prototypes, path, meta["files"])
        layout.write_meta(made, layout.LensMeta(**meta))
