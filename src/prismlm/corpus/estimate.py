"""The cost of a corpus: read a sample, build a corpus of it, and multiply."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prismlm.corpus.build import TRAINING_CHARACTERS, check_build, open_reader
from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.corpus.writer import CorpusWriter
from prismlm.cost import Cost, peak_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_SECONDS = 5.0
SAMPLE_CHARACTERS = 500_000


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Every n-th document of what was read of some inputs.

    Attributes:
        documents: at most about half a million characters of them.
        scale: how many times as much text the inputs hold; None where that is not known.
        num_documents: how many documents they hold; counted where all was read.
        seconds: how long reading all of them takes, the network included.
        unknown: what the sample does not tell, as sentences.
    """

    documents: list[Document]
    scale: float | None
    num_documents: int | None
    seconds: float | None
    unknown: tuple[str, ...] = ()


def draw(reader: DocumentReader) -> Sample:
    """Read for some seconds and keep documents evenly; small inputs are read whole and counted."""
    documents, step, size = list[Document](), 1, 0
    seen = characters = 0
    began, share = time.perf_counter(), 1.0
    for document in reader:
        seen += 1
        characters += len(document.text)
        if seen % step == 0:
            documents.append(document)
            size += len(document.text)
        while size > SAMPLE_CHARACTERS and len(documents) > 1:
            documents, step = documents[1::2], 2 * step
            size = sum(len(one.text) for one in documents)
        if time.perf_counter() - began > READING_SECONDS:
            share = reader.done / reader.total if reader.total else None
            break
    if not share:
        like = f"Whether the rest is like the first {seen:,} documents."
        more = "How much the dataset holds: it does not say before it is read."
        return Sample(documents, None, None, None, (like, more))
    seconds = (time.perf_counter() - began) / share
    return Sample(documents, characters / share / size, round(seen / share), seconds)


@contextmanager
def built(
    sample: Sample, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float = 0.05
) -> Iterator[Corpus]:
    """Yield a corpus of a sample, in a temporary directory."""
    with TemporaryDirectory() as name:
        directory = Path(name, "corpus")
        directory.mkdir()
        with CorpusWriter(directory, tokenizer, heldout_fraction=heldout_fraction) as writer:
            for _ in writer.write(sample.documents):
                pass
            writer.finish({})
        yield Corpus.open(directory)


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = 2**27,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
) -> Cost:
    """Estimate what :func:`build_corpus` with the same arguments would cost; writes nothing there.

    The figures are ``documents``, ``tokens``, ``sampled_documents``, ``tokens_per_second`` and
    ``bytes_per_token``.
    """
    check_build(Path(out), tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    chosen = None if tokenizer is None else load_tokenizer(tokenizer)
    return cost_of(draw(open_reader(inputs, columns, skip_bad_rows, chosen)), chosen, vocab_size)


def cost_of(
    sample: Sample, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int = 8192
) -> Cost:
    """Return what a corpus would cost of all that a sample was drawn from.

    Without a tokenizer one of ``vocab_size`` is trained.
    """
    scale, reads, training = sample.scale, 1 if tokenizer else 2, 0.0
    began = time.perf_counter()
    if tokenizer is None:
        texts = [document.text for document in sample.documents]
        tokenizer = train_tokenizer(iter(texts), vocab_size)
        # No more text is trained on than the limit.
        most = TRAINING_CHARACTERS / max(1, sum(map(len, texts)))
        training = (time.perf_counter() - began) * max(1.0, min(scale or most, most))
        began = time.perf_counter()
    with built(sample, tokenizer, 0.0) as corpus:
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
