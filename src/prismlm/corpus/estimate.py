"""What a build would cost, from encoding a small piece of the inputs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prismlm.corpus.build import (
    TRAINING_CHARACTERS,
    check_build,
    document_batches,
    encode_documents,
)
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.tokenizer import load_tokenizer, text_encoder, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 2_000_000
_PIECE_FILES = 8
# Measured: the interpreter with transformers, and the BPE trainer for each character it is given.
BASE_MEMORY = 300_000_000
TRAINING_MEMORY_PER_CHARACTER = 4
TEXT_COMPRESSION = 0.45


@dataclass(frozen=True, slots=True)
class BuildEstimate:
    """The expected size and cost of a build: bytes, tokens and seconds, all rough."""

    input_bytes: int
    text_bytes: int
    documents: int
    tokens: int
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_build(
    inputs: Paths,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = 2**27,
    overwrite: bool = False,
) -> BuildEstimate:
    """Estimate what :func:`build_corpus` with the same arguments would cost; writes nothing.

    About two megabytes from up to eight files spread over the inputs are read and encoded.

    Raises:
        InputError: what the build would refuse, as far as it shows in that piece.
    """
    check_build(Path(out), tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    reader = DocumentReader(inputs, columns)
    began = time.perf_counter()
    documents, scale = _piece(reader, columns)
    characters = sum(len(document.text) for document in documents)
    text_bytes = sum(len(document.text.encode()) for document in documents)
    read_seconds = time.perf_counter() - began

    began = time.perf_counter()
    chosen, vocabulary = tokenizer_of(documents, tokenizer, vocab_size)
    train_seconds = time.perf_counter() - began

    began = time.perf_counter()
    backend = text_encoder(chosen.backend_tokenizer, str(chosen.eos_token))
    tokens = count_tokens(documents, backend)
    encode_seconds = time.perf_counter() - began

    passes = 2 if tokenizer is None else 1
    seconds = training_scale(scale, characters) * train_seconds
    seconds += scale * (passes * read_seconds + encode_seconds)
    memory = BASE_MEMORY
    if tokenizer is None:
        memory += int(min(scale * characters, TRAINING_CHARACTERS) * TRAINING_MEMORY_PER_CHARACTER)
    token_bytes = 2 if vocabulary <= 2**16 else 4
    return BuildEstimate(
        input_bytes=reader.total_bytes,
        text_bytes=int(scale * text_bytes),
        documents=int(scale * len(documents)),
        tokens=int(scale * tokens),
        seconds=seconds,
        memory_bytes=memory,
        disk_bytes=int(scale * (tokens * token_bytes + text_bytes * TEXT_COMPRESSION)),
    )


def training_scale(scale: float, characters: int) -> float:
    """Return how much longer than on a piece a tokenizer is trained on all of ``scale`` pieces.

    By Heaps' law the distinct words, which training works on, grow as the root of the text.
    """
    return min(scale, max(1.0, TRAINING_CHARACTERS / max(1, characters))) ** 0.5


def count_tokens(documents: list[Document], encoder: Tokenizer) -> int:
    """Return how many tokens the documents have, their ends of text among them."""
    return sum(
        len(ids) + 1
        for batch in document_batches(iter(documents))
        for ids in encode_documents(encoder, batch)
    )


def _piece(reader: DocumentReader, columns: Columns | None) -> tuple[list[Document], float]:
    """Return documents from the inputs and how many times as much text all inputs hold."""
    step = max(1, len(reader.files) // _PIECE_FILES)
    files = reader.files[::step][:_PIECE_FILES]
    documents: list[Document] = []
    characters = estimated = size = 0
    for file in files:
        part = DocumentReader(file.path, columns)
        in_file = 0
        for document in part:
            documents.append(document)
            in_file += len(document.text)
            if in_file >= PIECE_CHARACTERS / len(files):
                break
        characters += in_file
        # File by file, since files differ in how well they are compressed.
        estimated += in_file * part.total_bytes / max(1, part.bytes_read)
        size += part.total_bytes
    return documents, estimated / characters * reader.total_bytes / size


def tokenizer_of(
    documents: list[Document], tokenizer: str | os.PathLike[str] | None, vocab_size: int
) -> tuple[PreTrainedTokenizerFast, int]:
    """Return a tokenizer and its size: the one that is named, or one trained on the documents."""
    if tokenizer is not None:
        chosen = load_tokenizer(tokenizer)
        return chosen, len(chosen)
    texts = (document.text for document in documents)
    return train_tokenizer(texts, vocab_size), vocab_size
