"""What building a corpus would cost, from a sample of its input."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import CorpusPart, open_reader
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.sampling import TRAINING_CHARACTERS, sample_documents
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import SHARD_TOKENS, PartWriter, merge_parts
from prismlm.cost import Cost, peak_memory
from prismlm.errors import check_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_SECONDS = 5.0
SAMPLE_CHARACTERS = 500_000


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Documents of the first seconds of reading, and estimates for the whole input.

    Attributes:
        documents: at most about half a million characters of them.
        scale: how many times as much text the inputs hold; None if unknown.
        num_documents: how many documents the inputs hold, counted or extrapolated.
        seconds: the time to read all of them, including the network.
        unknown: caveats, as sentences.
    """

    documents: list[Document]
    scale: float | None
    num_documents: int | None
    seconds: float | None
    unknown: tuple[str, ...] = ()


def draw_sample(reader: DocumentReader) -> Sample:
    """Read for some seconds and sample documents evenly; small inputs are read completely."""
    seen, characters, share = 0, 0, 1.0
    began = time.perf_counter()

    def first_documents() -> Iterator[Document]:
        nonlocal seen, characters, share
        for document in reader:
            seen += 1
            characters += len(document.text)
            yield document
            if time.perf_counter() - began > READING_SECONDS:
                share = reader.done / reader.total if reader.total else 0.0
                return

    documents = sample_documents(first_documents(), SAMPLE_CHARACTERS)
    if not share:
        like = f"Whether the rest is like the first {seen:,} documents."
        more = "How much the dataset holds: it does not say before it is read."
        return Sample(documents, None, None, None, (like, more))
    seconds = (time.perf_counter() - began) / share
    scale = characters / share / sum(len(document.text) for document in documents)
    return Sample(documents, scale, round(seen / share), seconds)


@contextmanager
def sample_corpus(
    sample: Sample, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float = 0.05
) -> Iterator[Corpus]:
    """Yield a corpus of a sample, in a temporary directory."""
    with TemporaryDirectory() as name:
        directory, part = Path(name, "corpus"), Path(name, "part")
        directory.mkdir()
        part.mkdir()
        with PartWriter(part, tokenizer, heldout_fraction=heldout_fraction) as writer:
            for _ in writer.write(sample.documents):
                pass
            writer.finish()
        merge_parts([part], directory, tokenizer, heldout_fraction)
        yield Corpus.open(directory)


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
    filters: Filters | None = None,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same arguments; ``out`` is not written.

    The figures are ``documents``, ``tokens``, ``sampled_documents``, ``tokens_per_second`` and
    ``bytes_per_token``.
    """
    target, filters = check_path("the corpus to write", out), filters or Filters()
    part = CorpusPart(
        target,
        tokenizer,
        vocab_size=vocab_size,
        heldout_fraction=heldout_fraction,
        shard_tokens=shard_tokens,
        filters=filters,
        overwrite=overwrite,
    )
    part.check()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    sample = draw_sample(open_reader(inputs, columns, skip_bad_rows, tokenizer=loaded))
    if filters != Filters():
        unknown = (*sample.unknown, "How much the filters leave out, and their time.")
        sample = replace(sample, unknown=unknown)
    return estimate_from(sample, loaded, vocab_size)


def estimate_from(
    sample: Sample, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int = 8192
) -> Cost:
    """Extrapolate the cost of a corpus from a sample of its input.

    Without a tokenizer one of ``vocab_size`` is trained.
    """
    scale, reads, training = sample.scale, 1 if tokenizer else 2, 0.0
    began = time.perf_counter()
    if tokenizer is None:
        texts = [document.text for document in sample.documents]
        tokenizer = train_tokenizer(iter(texts), vocab_size)
        max_scale = TRAINING_CHARACTERS / max(1, sum(map(len, texts)))
        training = (time.perf_counter() - began) * max(1.0, min(scale or max_scale, max_scale))
        began = time.perf_counter()
    with sample_corpus(sample, tokenizer, 0.0) as corpus:
        seconds = time.perf_counter() - began
        tokens = corpus.num_tokens
        disk = sum(path.stat().st_size for path in corpus.path.glob("*-0*"))
    figures = {
        "documents": sample.num_documents,
        "tokens": None,
        "sampled_documents": len(sample.documents),
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "bytes_per_token": disk / tokens,
    }
    total = None
    if scale is not None and sample.seconds is not None:
        total = training + reads * sample.seconds + scale * seconds
        figures["tokens"] = round(scale * tokens)
    return Cost(
        total,
        peak_memory(),
        None if scale is None else round(scale * disk),
        figures,
        basis=f"Measured on {len(sample.documents):,} of the documents.",
        unknown=sample.unknown,
    )
