"""What a build would cost, from building a corpus of a small piece of the inputs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from prismlm.corpus.build import (
    TRAINING_CHARACTERS,
    BuildSettings,
    check_build,
    tokenise,
    training_texts,
)
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.tokenizer import load_tokenizer, train_tokenizer
from prismlm.cost import Cost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 2_000_000
SAMPLE_SECONDS = 20.0
_PIECE_FILES = 8
# Measured: the interpreter with transformers, and the BPE trainer for each character it is given.
BASE_MEMORY = 300_000_000
TRAINING_MEMORY_PER_CHARACTER = 4


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some documents of what is to be read.

    Attributes:
        documents: about two million characters of them, or fewer if they came slowly.
        seconds: how long reading them took, the network included.
        scale: how many times as much text there is in all; None where that is not known.
        unknown: what the sample does not tell, as sentences.
    """

    documents: list[Document]
    seconds: float
    scale: float | None
    unknown: tuple[str, ...] = ()


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
) -> Cost:
    """Estimate what :func:`build_corpus` with the same arguments would cost; writes nothing there.

    About two megabytes from up to eight files spread over the inputs, or from the beginning of a
    dataset, are read, and a corpus of them is built in a temporary directory. The figures are
    ``documents``, ``tokens``, ``sampled_documents``, ``sampled_tokens``, ``tokens_per_second`` and
    ``bytes_per_token``; of files ``input_bytes`` and ``text_bytes`` too.

    Raises:
        InputError: what the build would refuse, as far as it shows in that piece.
    """
    check_build(Path(out), tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    chosen = None if tokenizer is None else load_tokenizer(tokenizer)
    if isinstance(inputs, HubDataset):
        return cost_of(sample_stream(inputs, columns, chosen), tokenizer, vocab_size)
    reader = DocumentReader(inputs, columns, tokenizer=chosen)
    return cost_of(_sample_files(reader, columns), tokenizer, vocab_size, reader.total_bytes)


def sample_stream(
    dataset: HubDataset,
    columns: Columns | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Sample:
    """Read the first documents of a dataset: about two million characters, at most 20 seconds.

    The tokenizer's chat template makes texts of messages.

    Raises:
        InputError: what reading the dataset would raise, as far as it shows in that piece.
    """
    began = time.perf_counter()
    reader = DatasetReader(dataset, columns)
    reader.tokenizer = tokenizer
    num_rows, documents, characters, whole = reader.num_rows, list[Document](), 0, True
    for document in reader:
        documents.append(document)
        characters += len(document.text)
        if characters >= PIECE_CHARACTERS or time.perf_counter() - began > SAMPLE_SECONDS:
            whole = num_rows is not None and reader.row >= num_rows
            break
    seconds = time.perf_counter() - began
    if whole:
        return Sample(documents, seconds, 1.0)
    unknown = [f"Whether the rest is like the first {len(documents):,} documents."]
    if num_rows is None:
        unknown.append("How much the dataset holds: it does not say before it is read.")
    scale = None if num_rows is None else max(1.0, num_rows / reader.row)
    return Sample(documents, seconds, scale, tuple(unknown))


def _sample_files(reader: DocumentReader, columns: Columns | None) -> Sample:
    # Of many small files the time to open each counts, so that as many are read as hold the piece.
    average = reader.total_bytes / len(reader.files)
    most = max(_PIECE_FILES, int(PIECE_CHARACTERS / max(1.0, average)))
    step = max(1, len(reader.files) // most)
    files = reader.files[::step][:most]
    documents: list[Document] = []
    characters = estimated = size = 0
    began = time.perf_counter()
    for file in files:
        part = DocumentReader(file.path, columns, tokenizer=reader.tokenizer)
        in_file = text_bytes = 0
        for document in part:
            documents.append(document)
            in_file += len(document.text)
            text_bytes += len(document.text.encode())
            if in_file >= PIECE_CHARACTERS / len(files):
                break
        characters += in_file
        # File by file, since files differ in how well they are compressed.
        noted = _text_bytes(file.path, columns or Columns())
        read = part.bytes_read / part.total_bytes if noted is None else text_bytes / noted
        estimated += in_file / min(1.0, max(read, 1e-9))
        size += part.total_bytes
    seconds = time.perf_counter() - began
    return Sample(documents, seconds, estimated / characters * reader.total_bytes / size)


def _text_bytes(path: Path, columns: Columns) -> int | None:
    """Return the bytes of all texts of a Parquet file, which its footer says; of others None.

    The first rows may be longer or shorter than the others, so that their number says little.
    """
    if path.suffix.lower() != ".parquet":
        return None
    with pq.ParquetFile(path) as table:
        name = columns.resolve(table.schema_arrow.names, str(path)).get("text")
        if name is None:
            return None
        groups = [table.metadata.row_group(n) for n in range(table.metadata.num_row_groups)]
        return sum(
            group.column(number).total_uncompressed_size
            for group in groups
            for number in range(group.num_columns)
            if group.column(number).path_in_schema == name
        )


def cost_of(
    sample: Sample,
    tokenizer: str | os.PathLike[str] | None,
    vocab_size: int = 8192,
    input_bytes: int | None = None,
) -> Cost:
    """Return what a corpus would cost of all that some documents were drawn from.

    Args:
        sample: the documents.
        tokenizer: a directory or name; None: one of ``vocab_size`` is trained.
        vocab_size: see ``tokenizer``.
        input_bytes: of the files to read, if it is files.
    """
    documents, scale, trains = sample.documents, sample.scale, tokenizer is None
    characters = sum(len(document.text) for document in documents)
    started = time.perf_counter()
    import_module("transformers.models.auto.tokenization_auto")
    began = time.perf_counter()
    once = began - started
    if tokenizer is None:
        texts = training_texts(iter(documents), TRAINING_CHARACTERS)
        chosen = train_tokenizer(iter(texts), vocab_size)
    else:
        chosen = load_tokenizer(tokenizer)
    chosen_seconds = time.perf_counter() - began
    began = time.perf_counter()
    tokens, disk = _build(documents, BuildSettings.of(chosen, 0.0, 2**27))
    each = (1 + trains) * sample.seconds + time.perf_counter() - began
    seconds, memory = None, BASE_MEMORY
    if scale is not None:
        more = training_scale(scale, characters) if trains else 1.0
        seconds = once + more * chosen_seconds + scale * each
    if trains:
        read = TRAINING_CHARACTERS if scale is None else scale * characters
        memory += int(min(read, TRAINING_CHARACTERS) * TRAINING_MEMORY_PER_CHARACTER)
    figures = {
        "documents": None if scale is None else int(scale * len(documents)),
        "tokens": None if scale is None else int(scale * tokens),
        "sampled_documents": len(documents),
        "sampled_tokens": tokens,
        "tokens_per_second": tokens / max(each, 1e-9),
        "bytes_per_token": disk / tokens,
    }
    if input_bytes is not None and scale is not None:
        text_bytes = sum(len(document.text.encode()) for document in documents)
        figures |= {"input_bytes": input_bytes, "text_bytes": int(scale * text_bytes)}
    whole = None if scale is None else int(scale * disk)
    return Cost(seconds, memory, whole, figures, unknown=sample.unknown)


def _build(documents: list[Document], settings: BuildSettings) -> tuple[int, int]:
    """Return the tokens of a corpus of some documents, and the bytes of its shards."""
    with TemporaryDirectory() as name, settings.writer(Path(name)) as writer:
        tokenise(iter(documents), settings, writer)
        tokens = writer.finish()["counts"]["tokens"]
        return tokens, sum(path.stat().st_size for path in Path(name).iterdir())


def training_scale(scale: float, characters: int) -> float:
    """Return how much longer than on a piece a tokenizer is trained on all of ``scale`` pieces.

    Counting words grows as the text, merging them as the root of it: over encyclopedia, manuals
    and minutes of 2 to 48 million characters, the exponent was measured as 0.86 to 1.0.
    """
    return min(scale, max(1.0, TRAINING_CHARACTERS / max(1, characters))) ** 0.9
