"""Text to tokens: documents keep their id, source, licence and offsets."""

from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import build_corpus, estimate_build
from prismlm.corpus.read import DocumentReader, HubDataset, sample_path
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import fingerprint, load_tokenizer, train_tokenizer
from prismlm.corpus.windows import (
    PackedDataset,
    WindowBatch,
    WindowGrid,
    document_windows,
    pack,
    window_batches,
)

__all__ = [
    "Columns",
    "Corpus",
    "Document",
    "DocumentReader",
    "Filters",
    "HubDataset",
    "PackedDataset",
    "WindowBatch",
    "WindowGrid",
    "build_corpus",
    "document_windows",
    "estimate_build",
    "fingerprint",
    "load_tokenizer",
    "pack",
    "sample_path",
    "train_tokenizer",
    "window_batches",
]
