"""What building a corpus would cost, from a sample of its input."""

from __future__ import annotations

import os
import time
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Document
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import TRAINING_CHARACTERS, CorpusPart
from prismlm.corpus.read import Paths
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import PART_FILE, PartWriter
from prismlm.cost import Cost, peak_memory
from prismlm.errors import check_path
from prismlm.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_SECONDS = 5.0
# The most that is made a corpus, but for a single document.
SAMPLE_CHARACTERS = 1_000_000


class _Sample:
    """Documents from all over what is read: those with the lowest of random numbers."""

    def __init__(self) -> None:
        self.characters, self._seen, self._cut, self._random = 0, 0, 1.0, Random(0)
        self._chosen: list[tuple[float, int, Document]] = []

    def offer(self, document: Document) -> None:
        """Take a document or not, and drop others if there is too much text."""
        self._seen += 1
        if (number := self._random.random()) >= self._cut:
            return
        heappush(self._chosen, (-number, self._seen, document))
        self.characters += len(document.text)
        while self.characters > SAMPLE_CHARACTERS and len(self._chosen) > 1:
            highest, _, dropped = heappop(self._chosen)
            self._cut = -highest
            self.characters -= len(dropped.text)

    def documents(self) -> list[Document]:
        """Return them in the order of the input."""
        return [document for _, _, document in sorted(self._chosen, key=itemgetter(1))]


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
    sample, seen, characters, share = _Sample(), 0, 0, 1.0
    began = time.perf_counter()
    for document in reader:
        seen += 1
        characters += len(document.text)
        sample.offer(document)
        if time.perf_counter() - began > READING_SECONDS:
            share = reader.done / reader.total if reader.total else 0.0
            break
    seconds, documents, kept = time.perf_counter() - began, sample.documents(), sample.characters
    scale = characters / share / kept if share else None
    began, training = time.perf_counter(), 0.0
    if loaded is None:
        loaded = train_tokenizer((document.text for document in documents), part.vocab_size)
        training = (time.perf_counter() - began) * min(scale or 1.0, TRAINING_CHARACTERS / kept)
    with TemporaryDirectory() as name:
        began = time.perf_counter()
        tokens, disk = _written(documents, loaded, Path(name))
        tokenising = time.perf_counter() - began
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


def _written(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, directory: Path
) -> tuple[int, int]:
    """Write documents as a part of a corpus, and return its tokens and the bytes of its shard."""
    with PartWriter(directory, tokenizer) as writer:
        for _ in writer.write(documents):
            pass
        writer.finish()
    tokens: int = read_json(directory / PART_FILE)["counts"]["tokens"]
    return tokens, sum(path.stat().st_size for path in directory.glob("*-0*"))
