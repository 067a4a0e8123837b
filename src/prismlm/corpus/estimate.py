"""What a corpus would take: some of the inputs is read and built in earnest, and multiplied."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prismlm.corpus.build import TRAINING_CHARACTERS, BuildSettings, check_build, tokenise
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.cost import Cost, peak_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING_SECONDS = 5.0
SAMPLE_CHARACTERS = 500_000
# Of all files some are opened, unless together they are this small.
MAX_FILES, ALL_BYTES = 64, 50_000_000
# Measured of the BPE trainer.
TRAINING_MEMORY_PER_CHARACTER = 4


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Documents drawn evenly from what was read of some inputs.

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
    """Read for some seconds and draw documents from it.

    Small inputs are read to their end and so counted; of larger ones the beginnings of up to 64
    files, or the beginning of a dataset, scaled by the bytes or rows that are left.

    Raises:
        InputError: what reading the inputs would raise, as far as it shows in what is read.
    """
    parts = [reader] if isinstance(reader, DatasetReader) else _spread(reader)
    drawn, began = _Drawn(), time.perf_counter()
    documents = characters = 0.0
    known = True
    for number, part in enumerate(parts, 1):
        before, share = (drawn.seen, drawn.characters), 1.0
        until = began + READING_SECONDS * number / len(parts)
        for document in part:
            drawn.add(document)
            if time.perf_counter() > until:
                share = part.share_read
                break
        known = known and share is not None
        documents += (drawn.seen - before[0]) / (share or 1.0)
        characters += (drawn.characters - before[1]) / (share or 1.0)
    if not known:
        first = f"Whether the rest is like the first {drawn.seen:,} documents."
        more = "How much the dataset holds: it does not say before it is read."
        return Sample(drawn.documents, None, None, None, (first, more))
    opened = sum(part.total_bytes for part in parts)
    files = reader.total_bytes / opened if opened else 1.0
    seconds = (time.perf_counter() - began) * files * characters / max(1, drawn.characters)
    scale = files * characters / max(1, drawn.size)
    return Sample(drawn.documents, scale, round(files * documents), seconds)


class _Drawn:
    """Every n-th document of a stream, n doubled whenever they become too many characters."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.size = self.seen = self.characters = 0
        self._step = 1

    def add(self, document: Document) -> None:
        self.seen += 1
        self.characters += len(document.text)
        if self.seen % self._step == 0:
            self.documents.append(document)
            self.size += len(document.text)
        while self.size > SAMPLE_CHARACTERS and len(self.documents) > 1:
            self.documents, self._step = self.documents[1::2], 2 * self._step
            self.size = sum(len(one.text) for one in self.documents)


def _spread(reader: DocumentReader) -> list[DocumentReader]:
    if not reader.files or reader.total_bytes <= ALL_BYTES:
        return [reader]
    step = -(-len(reader.files) // MAX_FILES)
    return [reader.of(file) for file in reader.files[::step]]


@contextmanager
def built(
    sample: Sample, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float = 0.05
) -> Iterator[Corpus]:
    """Yield a corpus of a sample, in a temporary directory."""
    settings = BuildSettings.of(tokenizer, heldout_fraction, 2**27)
    with TemporaryDirectory() as name:
        directory = Path(name, "corpus")
        directory.mkdir()
        with settings.writer(directory) as writer:
            tokenise(iter(sample.documents), settings, writer)
            settings.finish(directory, writer, {}, {})
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

    Raises:
        InputError: what the build would refuse, as far as it shows in what is read.
    """
    check_build(Path(out), tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    began = time.perf_counter()
    chosen = None if tokenizer is None else load_tokenizer(tokenizer)
    once = time.perf_counter() - began
    kind = DatasetReader if isinstance(inputs, HubDataset) else DocumentReader
    reader = kind(
        inputs,  # pyright: ignore[reportArgumentType]
        columns,
        tokenizer=chosen,
        skip_bad_rows=skip_bad_rows,
        answered_chats=True,
    )
    return cost_of(draw(reader), chosen, vocab_size, once)


def cost_of(
    sample: Sample,
    tokenizer: PreTrainedTokenizerFast | None,
    vocab_size: int = 8192,
    once: float = 0.0,
) -> Cost:
    """Return what a corpus would cost of all that a sample was drawn from.

    Args:
        sample: the documents.
        tokenizer: None: one of ``vocab_size`` is trained.
        vocab_size: see ``tokenizer``.
        once: seconds that do not grow with the text.
    """
    scale, trains, training, memory = sample.scale, tokenizer is None, 0.0, 0
    began = time.perf_counter()
    if tokenizer is None:
        texts = [document.text for document in sample.documents]
        tokenizer = train_tokenizer(iter(texts), vocab_size)
        characters = max(1, sum(map(len, texts)))
        most = TRAINING_CHARACTERS / characters
        # Counting words grows as the text, and no more text is counted than the limit.
        training = (time.perf_counter() - began) * max(1.0, min(scale or most, most))
        memory = int(min(scale or most, most) * characters * TRAINING_MEMORY_PER_CHARACTER)
        began = time.perf_counter()
    with built(sample, tokenizer, 0.0) as corpus:
        each = time.perf_counter() - began
        tokens = corpus.num_tokens
        disk = sum(path.stat().st_size for path in corpus.path.glob("*-0*"))
    figures = {
        "documents": sample.num_documents,
        "tokens": None if scale is None else round(scale * tokens),
        "sampled_documents": len(sample.documents),
        "tokens_per_second": tokens / max(each, 1e-9),
        "bytes_per_token": disk / tokens,
    }
    seconds = None
    if scale is not None and sample.seconds is not None:
        seconds = once + training + (1 + trains) * sample.seconds + scale * each
    return Cost(
        seconds,
        peak_memory() + memory,
        None if scale is None else round(scale * disk),
        figures,
        basis=f"Measured on {len(sample.documents):,} of the documents.",
        unknown=sample.unknown,
    )
