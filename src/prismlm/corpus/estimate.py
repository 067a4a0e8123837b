"""What building a corpus would cost, from a sample of its input."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Document
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import TRAINING_CHARACTERS, CorpusPart
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import PART_FILE, PartWriter
from prismlm.cost import Cost, peak_memory
from prismlm.errors import check_path
from prismlm.files import read_json

READING_SECONDS = 5.0
# The most that is made a corpus, but for a single document.
SAMPLE_CHARACTERS = 1_000_000


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same settings; ``out`` is not written.

    Some seconds are read, small inputs completely, and a sample of that is made a corpus. The
    figures are ``documents`` and ``tokens`` (None if unknown), ``sampled_documents``,
    ``tokens_per_second`` and ``bytes_per_token``.
    """
    settings["filters"] = settings.get("filters") or Filters()
    part = CorpusPart(check_path("the corpus to write", out), tokenizer, inputs, **settings)
    part.check()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    reader = part.open_inputs(tokenizer=loaded)
    began = time.perf_counter()
    documents, seen, characters, share = _sample(reader)
    seconds, kept = time.perf_counter() - began, sum(len(one.text) for one in documents)
    scale = characters / share / kept if share else None
    began, training = time.perf_counter(), 0.0
    if loaded is None:
        loaded = train_tokenizer((document.text for document in documents), part.vocab_size)
        training = (time.perf_counter() - began) * min(scale or 1.0, TRAINING_CHARACTERS / kept)
    with TemporaryDirectory() as name:
        began = time.perf_counter()
        with PartWriter(Path(name), loaded) as writer:
            for _ in writer.write(documents):
                pass
            writer.finish()
        tokenising = time.perf_counter() - began
        tokens = read_json(Path(name) / PART_FILE)["counts"]["tokens"]
        disk = sum(path.stat().st_size for path in Path(name).glob("*-0*"))
    figures = {
        "documents": round(seen / share) if share else None,
        "tokens": round(scale * tokens) if scale else None,
        "sampled_documents": len(documents),
        "tokens_per_second": tokens / tokenising,
        "bytes_per_token": disk / tokens,
    }
    unknown = list[str]()
    if scale is None:
        unknown.append(f"Whether the rest is like the first {seen:,} documents.")
        unknown.append("How much the dataset holds: it does not say before it is read.")
    if part.filters != Filters():
        unknown.append("How much the filters leave out, and their time.")
    return Cost(
        training + seconds / share + scale * tokenising if scale else None,
        peak_memory(),
        round(scale * disk) if scale else None,
        figures,
        basis=f"Measured on {len(documents):,} of the documents.",
        unknown=tuple(unknown),
    )


def _sample(reader: DocumentReader) -> tuple[list[Document], int, int, float]:
    """Read for some seconds.

    Returned are every n-th document, the number of all and of their characters, and the share of
    the input that they are, 0 if it is unknown.
    """
    began, documents, every, kept, seen, characters = time.perf_counter(), [], 1, 0, 0, 0
    for document in reader:
        if seen % every == 0:
            documents.append(document)
            kept += len(document.text)
        seen += 1
        characters += len(document.text)
        if kept > SAMPLE_CHARACTERS and len(documents) > 1:
            documents, every = documents[::2], 2 * every
            kept = sum(len(one.text) for one in documents)
        if time.perf_counter() - began > READING_SECONDS:
            return documents, seen, characters, reader.done / reader.total if reader.total else 0.0
    return documents, seen, characters, 1.0
