"""Reading a corpus directory: tokens by position, documents, and the text of any token span."""

from __future__ import annotations

import copy
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.encode import Encoder
from prismlm.corpus.tables import ParquetTable
from prismlm.errors import (
    FormatError,
    InputError,
    check_choice,
    check_path,
    check_text,
    check_whole,
)
from prismlm.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Split = Literal["train", "heldout", "all"]


class Corpus:
    """A corpus directory, opened for reading.

    Positions are global int64 token offsets: the corpus is one sequence of documents, each with
    the special tokens that the tokenizer puts before a text, such as ``<s>``, and a final
    end-of-text token. Documents are numbered from 0 in that order. Methods raise InputError for a
    position, document or name that is not in the corpus, FormatError for a damaged file.
    A pickled corpus contains only the path.

    Attributes:
        path, name: of the directory.
        meta: the contents of ``corpus.json``.
        documents: the table of documents, read by row group.
        num_tokens: the number of tokens, including end-of-text tokens.
        eos_token_id: the token that ends every document.
        prefix: the tokens that the tokenizer puts before a text, and that start every window.
        suffix: the tokens that the tokenizer puts after a text, without the end-of-text token.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path, self.name, self.meta = path, path.resolve().name, meta
        self.num_tokens: int = meta["counts"]["tokens"]
        self.eos_token_id: int = meta["tokenizer"]["eos_token_id"]
        self.prefix: list[int] = meta["tokenizer"].get("prefix", [])
        self.suffix: list[int] = meta["tokenizer"].get("suffix", [])
        shards = meta["shards"]
        self._shard_starts = [0, *accumulate(shard["tokens"] for shard in shards)][:-1]
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self._shard = cache(lambda n: layout.map_file(path / layout.TOKENS.format(n), dtype))
        self._columns: dict[str, list[str | None]] = {}
        self._held_out = cache(self._find_held_out)
        self._left_out = np.empty(0, dtype=np.int64)
        # Older corpora have no split column.
        schema = layout.STORED_SCHEMA if meta["split"].get("stated") else layout.DOCUMENT_SCHEMA
        self.documents = self._table(layout.DOCUMENTS, schema)
        self._texts = self._table(layout.TEXTS, layout.TEXT_SCHEMA)

    def _table(self, file_name: str, schema: pa.Schema) -> ParquetTable:
        paths = [self.path / file_name.format(n) for n in range(len(self.meta["shards"]))]
        return ParquetTable({str(path): path for path in paths}, schema, layout.REBUILD)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Corpus:
        """Open a corpus directory; only ``corpus.json`` and the file sizes are read."""
        directory = check_path("the corpus", path)
        if not layout.is_corpus(directory):
            raise InputError(
                f"{directory} is not a corpus: expected a directory with {layout.META_FILE}; build "
                "one with `prismlm corpus build INPUT --out DIR`."
            )
        meta = read_json(directory / layout.META_FILE)
        layout.check_complete(directory, meta)
        return cls(directory, meta)

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus.open, (self.path,)

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, {len(self)} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return self.meta["counts"]["documents"]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, documents, tokenizer and split rule, independent of the sharding."""
        keys = ("version", "dtype", "tokenizer", "split", "counts", "digests")
        return fingerprints.of_json({key: self.meta[key] for key in keys})

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, for encoding and decoding; see :meth:`spans` for offsets."""
        from prismlm.corpus.tokenizer import load_tokenizer

        return load_tokenizer(self.path / layout.TOKENIZER_DIRECTORY)

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each document starts: int64 global positions [documents]."""
        return self.documents.column("start").to_numpy()

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each document has, including its end of text: int64 [documents]."""
        return self.documents.column("length").to_numpy()

    @property
    def doc_ids(self) -> list[str]:
        """The id of every document, in order."""
        return self.column("doc_id")  # pyright: ignore[reportReturnType]

    def column(self, name: str) -> list[str | None]:
        """Return one metadata column: doc_id, source, domain, license, title or url."""
        check_choice("the column", name, [fact for fact, _ in layout.FACTS])
        if name not in self._columns:
            self._columns[name] = self.documents.column(name).to_pylist()
        return self._columns[name]

    @cached_property
    def _ids(self) -> pa.ChunkedArray:
        return self.documents.column("doc_id")

    def find(self, doc_id: str) -> int:
        """Return the number of the document with this id."""
        number = pc.index(self._ids, check_text("the id", doc_id)).as_py()
        if number < 0:
            raise InputError(f"The corpus {self.name!r} has no document with the id {doc_id!r}.")
        return number

    def split(self, name: Split, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the documents of a split, of those from ``start`` to ``stop``: int64 [n]."""
        check_choice("the split", name, ("train", "heldout", "all"))
        numbers = np.arange(start, len(self) if stop is None else stop, dtype=np.int64)
        if name == "all":
            return numbers
        chosen = numbers[self._held_out(start, len(numbers)) == (name == "heldout")]
        return np.setdiff1d(chosen, self._left_out, assume_unique=True)

    def without(self, documents: Collection[int]) -> Corpus:
        """Return this corpus with some documents, by number, in no split but "all"."""
        corpus = copy.copy(self)
        corpus._left_out = np.array(sorted({*documents}), dtype=np.int64)
        return corpus

    def _find_held_out(self, start: int, count: int) -> np.ndarray:
        columns = {"doc_id": self._ids}
        if self.meta["split"].get("stated"):
            columns["split"] = self.documents.column("split")
        return layout.held_out(pa.table(columns).slice(start, count), self.meta["split"])

    def document_at(self, position: int) -> int:
        """Return the number of the document that a global position lies in."""
        self._check_range(position, 1)
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return ``length`` token ids from a global position on, as stored (uint16 or uint32).

        Within one shard this is a read-only view of the file, not a copy.
        """
        start, end = self._check_range(start, length)
        first = bisect_right(self._shard_starts, start) - 1
        last = max(first, bisect_left(self._shard_starts, end) - 1)
        bounds = ((n, self._shard_starts[n]) for n in range(first, last + 1))
        parts = [self._shard(n)[max(0, start - at) : end - at] for n, at in bounds]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each shard, as a read-only view of the file."""
        return map(self._shard, range(len(self._shard_starts)))

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Return a copy of :meth:`tokens`."""
        return np.array(self.tokens(start, length))

    def text(self, index: int) -> str:
        """Return the text of a document; reads one row group of at most a megabyte."""
        index = check_whole("the number of the document", index, 0, len(self) - 1)
        return self._texts.row(index, ("text",))["text"]

    def spans(self, index: int) -> np.ndarray:
        """Return where each token of a document lies in its text: int64 [length, 2].

        Rows are start and end in characters. Special tokens around the text have empty spans at
        its ends. Tokens that hold only a part of a character have the span of that character, so
        ``text[spans[a, 0]:spans[b - 1, 1]]`` has every character that tokens a to b touch.
        """
        text, row = self.text(index), self.documents.row(index, ("doc_id", "start", "length"))
        ids = self.read_tokens(row["start"], row["length"])[:-1]
        around = len(self.prefix), len(self.suffix)
        # A chat has only the special tokens of its template.
        for before, after in dict.fromkeys((around, (0, 0))):
            spans = self._encoder.spans(text, ids[before : len(ids) - after])
            if spans is not None:
                start = np.zeros((before, 2), np.int64)
                end = np.full((after + 1, 2), len(text), np.int64)
                return np.concatenate([start, spans, end])
        raise FormatError(
            f"{self.path}: the tokenizer gives other tokens for document "
            f"{row['doc_id']!r} than are stored. Build the corpus again."
        )

    @cached_property
    def _encoder(self) -> Encoder:
        from tokenizers import Tokenizer

        path = self.path / layout.TOKENIZER_DIRECTORY / "tokenizer.json"
        try:
            return Encoder(Tokenizer.from_file(str(path)), self.meta["tokenizer"]["eos_token"])
        except Exception as error:  # tokenizers raises nothing narrower
            raise FormatError(f"{path} is damaged ({error}). {layout.REBUILD}") from error

    def _check_range(self, start: int, length: int) -> tuple[int, int]:
        start, end = int(start), int(start) + int(length)
        if not 0 <= start <= end <= self.num_tokens:
            raise InputError(
                f"Tokens {start} to {end} lie outside of the corpus {self.name!r}, which has "
                f"{self.num_tokens}."
            )
        return start, end
