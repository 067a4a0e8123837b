"""What building a corpus would cost, from a sample of its input."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Document
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import TRAINING_CHARACTERS, CorpusPart
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import PartWriter, merge_parts
from prismlm.cost import Cost, peak_memory
from prismlm.errors import check_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_SECONDS = 5.0
SAMPLE_CHARACTERS = 500_000


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the first seconds of reading show of an input.

    Attributes:
        documents: the first, of about half a million characters.
        corpus: of these.
        scale: how many times as much text the inputs hold; None if unknown.
        cost: of the corpus of all; its figures are ``documents`` and ``tokens`` (None if unknown),
            ``sampled_documents``, ``tokens_per_second`` and ``bytes_per_token``.
    """

    documents: list[Document]
    corpus: Corpus
    scale: float | None
    cost: Cost


@contextmanager
def sample(
    reader: DocumentReader, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int = 8192
) -> Iterator[Sample]:
    """Read for some seconds, small inputs completely, and yield a sample.

    Without a tokenizer one of ``vocab_size`` is trained.
    """
    documents, kept, seen, characters, share = list[Document](), 0, 0, 0, 1.0
    began = time.perf_counter()
    for document in reader:
        seen += 1
        characters += len(document.text)
        if kept < SAMPLE_CHARACTERS:
            documents.append(document)
            kept = characters
        if time.perf_counter() - began > READING_SECONDS:
            share = reader.done / reader.total if reader.total else 0.0
            break
    seconds, scale = time.perf_counter() - began, characters / share / kept if share else None
    began, training = time.perf_counter(), 0.0
    if tokenizer is None:
        tokenizer = train_tokenizer((document.text for document in documents), vocab_size)
        training = (time.perf_counter() - began) * min(scale or 1.0, TRAINING_CHARACTERS / kept)
        began = time.perf_counter()
    with TemporaryDirectory() as name:
        directory, part = Path(name, "corpus"), Path(name, "part")
        directory.mkdir()
        part.mkdir()
        with PartWriter(part, tokenizer) as writer:
            for _ in writer.write(documents):
                pass
            writer.finish()
        merge_parts([part], directory, tokenizer, 0.05)
        corpus, tokenising = Corpus.open(directory), time.perf_counter() - began
        disk = sum(path.stat().st_size for path in directory.glob("*-0*"))
        figures = {
            "documents": round(seen / share) if share else None,
            "tokens": round(scale * corpus.num_tokens) if scale else None,
            "sampled_documents": len(documents),
            "tokens_per_second": corpus.num_tokens / tokenising,
            "bytes_per_token": disk / corpus.num_tokens,
        }
        like = f"Whether the rest is like the first {seen:,} documents."
        more = "How much the dataset holds: it does not say before it is read."
        cost = Cost(
            training + seconds / share + scale * tokenising if scale else None,
            peak_memory(),
            round(scale * disk) if scale else None,
            figures,
            basis=f"Measured on {len(documents):,} of the documents.",
            unknown=() if scale else (like, more),
        )
        yield Sample(documents, corpus, scale, cost)


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same settings; ``out`` is not written.

    The figures are those of a :class:`Sample`.
    """
    part = CorpusPart(check_path("the corpus to write", out), tokenizer, inputs, **settings)
    part.check()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    with sample(part.open_inputs(tokenizer=loaded), loaded, part.vocab_size) as found:
        unknown = found.cost.unknown
        if part.filters != Filters():
            unknown += ("How much the filters leave out, and their time.",)
        return replace(found.cost, unknown=unknown)
