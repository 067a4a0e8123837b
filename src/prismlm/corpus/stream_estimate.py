"""What reading a dataset would cost, from the first of its stream; and what that cannot tell."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from prismlm.corpus.build import TRAINING_CHARACTERS, check_build
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.estimate import (
    BASE_MEMORY,
    PIECE_CHARACTERS,
    TEXT_COMPRESSION,
    TRAINING_MEMORY_PER_CHARACTER,
    count_tokens,
    tokenizer_of,
    training_scale,
)
from prismlm.corpus.tokenizer import text_encoder

SAMPLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class StreamSample:
    """The first documents of a dataset.

    Attributes:
        documents: about two million characters of them, or fewer if they came slowly.
        rows: how many rows were read for them.
        seconds: how long that took, the network included.
        whole: whether these are all there are.
        num_rows: how many rows the dataset says it has; None: it does not.
    """

    documents: list[Document]
    rows: int
    seconds: float
    whole: bool
    num_rows: int | None

    @property
    def scale(self) -> float | None:
        """How many times as much the dataset holds, or None where that is not known."""
        if self.whole:
            return 1.0
        return None if self.num_rows is None else max(1.0, self.num_rows / self.rows)

    @property
    def unknown(self) -> list[str]:
        """What the sample does not tell, as sentences."""
        if self.whole:
            return []
        missing = [f"Whether the rest is like the first {len(self.documents):,} documents."]
        if self.scale is None:
            missing.append("How much the dataset holds: it does not say before it is read.")
        return missing


@dataclass(frozen=True, slots=True)
class StreamEstimate:
    """The expected size and cost of a corpus of a dataset: tokens, seconds and bytes, all rough.

    Attributes:
        sampled_documents: how many documents were read for it.
        sampled_tokens: how many tokens those have.
        documents: of the whole dataset; None, here and below: not known before it is read.
        tokens: likewise.
        seconds: to read and tokenise all of it, and to train a tokenizer where none is given.
        disk_bytes: of the corpus.
        tokens_per_second: read and tokenised.
        bytes_per_token: on disk, text and tokens.
        memory_bytes: peak.
        unknown: what the sample does not tell, as sentences.
    """

    sampled_documents: int
    sampled_tokens: int
    documents: int | None
    tokens: int | None
    seconds: float | None
    disk_bytes: int | None
    tokens_per_second: float
    bytes_per_token: float
    memory_bytes: int
    unknown: list[str]


def sample_stream(dataset: HubDataset, columns: Columns | None = None) -> StreamSample:
    """Read the first documents of a dataset: about two million characters, at most 20 seconds.

    Raises:
        InputError: what reading the dataset would raise, as far as it shows in that piece.
    """
    began = time.perf_counter()
    reader = DatasetReader(dataset, columns)
    num_rows = reader.num_rows
    documents: list[Document] = []
    characters, whole = 0, True
    for document in reader:
        documents.append(document)
        characters += len(document.text)
        if characters >= PIECE_CHARACTERS or time.perf_counter() - began > SAMPLE_SECONDS:
            whole = num_rows is not None and reader.row >= num_rows
            break
    return StreamSample(documents, reader.row, time.perf_counter() - began, whole, num_rows)


def estimate_stream(
    inputs: HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = 2**27,
    overwrite: bool = False,
) -> StreamEstimate:
    """Estimate what ``build_corpus`` of a dataset with these arguments would cost; writes nothing.

    Raises:
        InputError: what the build would refuse, as far as it shows in the first documents.
    """
    check_build(Path(out), tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    return estimate_of_sample(sample_stream(inputs, columns), tokenizer, vocab_size)


def estimate_of_sample(
    sample: StreamSample, tokenizer: str | os.PathLike[str] | None, vocab_size: int = 8192
) -> StreamEstimate:
    """Estimate from the first documents what a corpus of all of them would cost.

    Args:
        sample: the first documents.
        tokenizer: a directory or name; None: one of ``vocab_size`` is trained.
        vocab_size: see ``tokenizer``.
    """
    documents = sample.documents
    began = time.perf_counter()
    chosen, vocabulary = tokenizer_of(documents, tokenizer, vocab_size)
    train_seconds = time.perf_counter() - began
    began = time.perf_counter()
    tokens = count_tokens(documents, text_encoder(chosen.backend_tokenizer, str(chosen.eos_token)))
    passes = 1 if tokenizer is not None else 2
    seconds = passes * sample.seconds + time.perf_counter() - began
    characters = sum(len(document.text) for document in documents)
    text_bytes = sum(len(document.text.encode()) for document in documents)
    disk = tokens * (2 if vocabulary <= 2**16 else 4) + text_bytes * TEXT_COMPRESSION
    scale, memory, whole_seconds = sample.scale, BASE_MEMORY, None
    if scale is not None:
        training = train_seconds * training_scale(scale, characters) if passes == 2 else 0.0
        whole_seconds = scale * seconds + training
    if passes == 2:
        trained_on = TRAINING_CHARACTERS if scale is None else scale * characters
        memory += int(min(trained_on, TRAINING_CHARACTERS) * TRAINING_MEMORY_PER_CHARACTER)
    return StreamEstimate(
        sampled_documents=len(documents),
        sampled_tokens=tokens,
        documents=None if scale is None else int(scale * len(documents)),
        tokens=None if scale is None else int(scale * tokens),
        seconds=whole_seconds,
        disk_bytes=None if scale is None else int(scale * disk),
        tokens_per_second=tokens / max(seconds, 1e-9),
        bytes_per_token=disk / tokens,
        memory_bytes=memory,
        unknown=sample.unknown,
    )
