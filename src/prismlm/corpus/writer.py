"""Writing the shards of a corpus directory, and reading again those that are closed.

Memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.documents import METADATA, Document, stated_part
from prismlm.errors import FormatError
from prismlm.files import json_text

_TEXT_BYTES_PER_GROUP = 1_000_000
_ROWS_AT_ONCE = 64
_DOCUMENTS_PER_GROUP = 2**12


class CorpusWriter:
    """Writes documents with their tokens, in order, as the shards of a corpus directory.

    A document is never split between shards: a shard is closed before the document that would
    take it beyond ``shard_tokens``. Use it as a context manager and call :meth:`finish`.

    Attributes:
        shards: those that are closed: their documents, tokens and files with sizes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: np.dtype[Any],
        eos_token_id: int,
        shard_tokens: int,
        heldout_fraction: float,
    ) -> None:
        self._directory = directory
        self._dtype = dtype.newbyteorder("<")
        self._eos = eos_token_id
        self._shard_tokens = shard_tokens
        self._heldout_fraction = heldout_fraction
        self._shard: _Shard | None = None
        self.shards: list[dict[str, Any]] = []
        self._documents = self._tokens = self._characters = 0
        self._heldout = {"documents": 0, "tokens": 0}
        # The key and length of the document that is held out where the fraction holds out none.
        self._first_to_hold_out = (1.0, 0)
        self._stated = Counter[str]()
        self._by: dict[str, dict[str | None, dict[str, int]]] = {"domain": {}, "license": {}}
        self._token_digest = hashlib.sha256()
        self._document_digest = hashlib.sha256()

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shard is not None:
            self._shard.files.close()

    def add(self, document: Document, ids: list[int]) -> None:
        """Append one document; ``ids`` are its tokens without the end of text.

        Raises:
            InputError: the part that it says it belongs to is none.
        """
        if document.split is not None:
            document = replace(document, split=stated_part(document))
        tokens = np.array([*ids, self._eos], dtype=self._dtype).tobytes()
        length = len(ids) + 1
        if self._shard is not None and self._shard.tokens + length > self._shard_tokens:
            self._close_shard()
        if self._shard is None:
            self._shard = _Shard(self._directory, len(self.shards))
        text = document.text.encode()
        self._shard.add(document, len(text), tokens, self._tokens, length)
        self._note(document, text, tokens, length)

    def resume(self, shards: list[dict[str, Any]]) -> Iterator[Document]:
        """Count again what an earlier writer left in the directory; yield its documents.

        Args:
            shards: the shards that it had closed, as :attr:`shards` listed them.

        Raises:
            FormatError: a file is missing or damaged.
        """
        for number, shard in enumerate(shards):
            for document, tokens in read_shard(self._directory, number, shard, self._dtype):
                length = len(tokens) // self._dtype.itemsize
                self._note(document, document.text.encode(), tokens, length)
                yield document
            self.shards.append(shard)

    def _note(self, document: Document, text: bytes, tokens: bytes, length: int) -> None:
        self._token_digest.update(tokens)
        metadata = [document.doc_id, document.source, document.domain]
        metadata += [document.license, document.title, document.url, len(text)]
        # Only where there is one, so that other corpora keep the fingerprint that they had before.
        metadata += [document.split] if document.split is not None else []
        self._document_digest.update(json_text(metadata, ensure_ascii=True).encode() + text)
        self._documents += 1
        self._tokens += length
        self._characters += len(document.text)
        if document.split is not None:
            self._stated[document.split] += 1
        if document.split is None:
            key = (layout.split_key(document.doc_id), length)
            self._first_to_hold_out = min(self._first_to_hold_out, key)
        if layout.is_held_out(document.doc_id, self._heldout_fraction, document.split):
            self._heldout["documents"] += 1
            self._heldout["tokens"] += length
        for key, groups in self._by.items():
            counts = groups.setdefault(getattr(document, key), {"documents": 0, "tokens": 0})
            counts["documents"] += 1
            counts["tokens"] += length

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.shards.append(self._shard.close())
            self._shard = None

    def finish(self) -> dict[str, Any]:
        """Close the last shard and return what ``corpus.json`` says about the contents.

        Of two or more documents at least one is held out, unless the held-out fraction is 0: where
        it is too small for that, the fraction becomes the least that holds one out.
        """
        self._close_shard()
        key, length = self._first_to_hold_out
        none_held_out = self._documents > 1 and not self._heldout["documents"]
        if none_held_out and 0 < self._heldout_fraction <= key < 1:
            self._heldout_fraction = math.nextafter(key, 1.0)
            self._heldout = {"documents": 1, "tokens": length}
        groups = {
            key: [
                {key: name, **counts}
                for name, counts in sorted(found.items(), key=lambda item: item[0] or "")
            ]
            for key, found in self._by.items()
        }
        return {
            "split": self._split(),
            "counts": {
                "documents": self._documents,
                "tokens": self._tokens,
                "characters": self._characters,
            },
            "heldout": self._heldout,
            "domains": groups["domain"],
            "licenses": groups["license"],
            "shards": self.shards,
            "digests": {
                "tokens": self._token_digest.hexdigest(),
                "documents": self._document_digest.hexdigest(),
            },
        }

    def _split(self) -> dict[str, Any]:
        fraction = {"heldout_fraction": self._heldout_fraction}
        if not self._stated:
            return {"rule": layout.SPLIT_RULE, **fraction}
        stated = {part: self._stated[part] for part in ("train", "heldout")}
        return {"rule": layout.STATED_RULE, **fraction, "stated": stated}


class _Shard:
    def __init__(self, directory: Path, number: int) -> None:
        self._paths = [
            directory / name(number)
            for name in (layout.tokens_file, layout.documents_file, layout.text_file)
        ]
        self.files = ExitStack()
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 6}
        options["write_page_checksum"] = True
        self._token_file = self.files.enter_context(self._paths[0].open("wb"))
        self._document_table = self.files.enter_context(
            pq.ParquetWriter(self._paths[1], layout.STORED_SCHEMA, **options)
        )
        # Dictionaries and statistics of whole texts only cost space and time to read past.
        self._text_table = self.files.enter_context(
            pq.ParquetWriter(
                self._paths[2],
                layout.TEXT_SCHEMA,
                use_dictionary=False,
                write_statistics=False,
                **options,
            )
        )
        self.tokens = self.documents = 0
        self._rows: list[dict[str, Any]] = []
        self._texts: list[dict[str, str]] = []
        self._text_bytes = 0

    def add(
        self, document: Document, text_bytes: int, tokens: bytes, start: int, length: int
    ) -> None:
        self._token_file.write(tokens)
        self.tokens += length
        self.documents += 1
        metadata = {name: getattr(document, name) for name in ("doc_id", *METADATA)}
        self._rows.append({**metadata, "start": start, "length": length})
        if len(self._rows) == _DOCUMENTS_PER_GROUP:
            self._flush_rows()
        if self._texts and self._text_bytes + text_bytes > _TEXT_BYTES_PER_GROUP:
            self._flush_texts()
        self._texts.append({"doc_id": document.doc_id, "text": document.text})
        self._text_bytes += text_bytes

    def _flush_rows(self) -> None:
        self._document_table.write_table(
            pa.Table.from_pylist(self._rows, schema=layout.STORED_SCHEMA)
        )
        self._rows = []

    def _flush_texts(self) -> None:
        self._text_table.write_table(pa.Table.from_pylist(self._texts, schema=layout.TEXT_SCHEMA))
        self._texts = []
        self._text_bytes = 0

    def close(self) -> dict[str, Any]:
        if self._rows:
            self._flush_rows()
        if self._texts:
            self._flush_texts()
        self.files.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "files": {path.name: path.stat().st_size for path in self._paths},
            # Read whole in any case; of the others parts are read, whose pages have checksums.
            "digest": fingerprints.of_file(self._paths[1]),
        }


def read_shard(
    directory: Path, number: int, shard: dict[str, Any], dtype: np.dtype[Any]
) -> Iterator[tuple[Document, bytes]]:
    """Yield each document of a shard with its tokens, as they were written.

    Args:
        directory: where the shard is.
        number: which one.
        shard: its ``documents``, ``tokens`` and ``files``, as ``corpus.json`` lists them.
        dtype: of a token.

    Raises:
        FormatError: a file is missing, was cut off or is damaged.
    """
    for name, size in shard["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise _damaged(directory, f"{name} is missing or not of {size} bytes")
    rows = _rows(directory / layout.documents_file(number))
    texts = _rows(directory / layout.text_file(number))
    try:
        with (directory / layout.tokens_file(number)).open("rb") as tokens:
            for row, text in zip(rows, texts, strict=True):
                metadata = {name: row.get(name) for name in METADATA}
                document = Document(row["doc_id"], text["text"], **metadata)
                yield document, tokens.read(row["length"] * dtype.itemsize)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(directory, str(error)) from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as table:
        for batch in table.iter_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _damaged(directory: Path, why: str) -> FormatError:
    return FormatError(
        f"what an interrupted build left in {directory} is damaged ({why}). Remove it, and the "
        "same command starts anew."
    )
