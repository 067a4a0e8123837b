"""What building and indexing a corpus of a dataset would cost, from the first of its stream."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from prismlm.corpus.build import build_corpus
from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns
from prismlm.corpus.stream_estimate import StreamEstimate, estimate_of_sample, sample_stream
from prismlm.index.build import IndexOptions
from prismlm.index.estimate import estimate_index, lens_bytes
from prismlm.layers import PrototypeHead

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document


@dataclass(frozen=True, slots=True)
class DatasetIndexEstimate:
    """The expected cost of a corpus and its index, all rough.

    Attributes:
        corpus: of building the corpus.
        tokens: predictions to score; None, here and below: not known before the dataset is read.
        seconds: of the index alone.
        tokens_per_second: of the index, measured on the first documents.
        memory_bytes: peak of the index, the interpreter and model included.
        disk_bytes: of the finished lens, at most.
        unknown: what the sample does not tell, as sentences.
    """

    corpus: StreamEstimate
    tokens: int | None
    seconds: float | None
    tokens_per_second: float
    memory_bytes: int
    disk_bytes: int
    unknown: list[str]


def estimate_dataset_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    tokenizer: PreTrainedTokenizerFast,
    dataset: HubDataset,
    options: IndexOptions,
    *,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
) -> DatasetIndexEstimate:
    """Estimate what a corpus of a dataset and its index would cost.

    The first documents are read, tokenised and a few of them indexed, in a temporary directory
    that is removed; nothing else is written.

    Raises:
        InputError: what reading the dataset or the index would raise, as far as it shows in them.
    """
    sample = sample_stream(dataset, columns)
    with tempfile.TemporaryDirectory() as directory:
        own = Path(directory, "tokenizer")
        tokenizer.save_pretrained(own)
        expected = estimate_of_sample(sample, own)
        first = _write(sample.documents, Path(directory, "first.jsonl"))
        corpus = build_corpus(first, Path(directory, "corpus"), tokenizer=own, heldout_fraction=0)
        measured = estimate_index(model, head, corpus, replace(options, split="all"))
    read = {"train": 1 - heldout_fraction, "heldout": heldout_fraction, "all": 1.0}[options.split]
    tokens = documents = None
    if expected.tokens is not None and expected.documents is not None:
        documents = int(read * expected.documents)
        tokens = int(read * (expected.tokens - expected.documents))
    return DatasetIndexEstimate(
        corpus=expected,
        tokens=tokens,
        seconds=None if tokens is None else tokens / measured.tokens_per_second,
        tokens_per_second=measured.tokens_per_second,
        memory_bytes=measured.memory_bytes,
        disk_bytes=lens_bytes(head, options, documents, tokens),
        unknown=expected.unknown,
    )


def _write(documents: list[Document], path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            row = {"id": document.doc_id, "text": document.text, "source": document.source}
            file.write(json.dumps(row) + "\n")
    return path
