"""Writing a corpus directory: documents and their tokens as shards, and ``corpus.json``."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.documents import METADATA, Document
from prismlm.corpus.encode import around_text, encoder_of
from prismlm.corpus.tokenizer import fingerprint
from prismlm.errors import FormatError, InputError
from prismlm.files import json_text, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1_000_000, 1024
# Size of a row group: one document reads in milliseconds.
GROUP_BYTES, GROUP_DOCUMENTS = 1_000_000, 4096


class CorpusWriter:
    """Writes documents, in order, as a corpus directory.

    A document is never split between shards: a shard is closed before the document that would
    take it beyond ``shard_tokens``. Use it as a context manager and end with :meth:`finish`.

    Attributes:
        meta: the description of the tokenizer in ``corpus.json``.
        shards: the closed shards: documents, tokens and files with their sizes.
        closed_digest: digest of the documents in the closed shards.
        fingerprints: of the files of the closed shards, by name.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerFast,
        *,
        heldout_fraction: float = 0.05,
        shard_tokens: int = 2**27,
    ) -> None:
        self._directory, self._tokenizer = directory, tokenizer
        self._heldout_fraction, self._shard_tokens = heldout_fraction, shard_tokens
        self._eos = cast(int, tokenizer.eos_token_id)
        vocabulary = max(len(tokenizer), self._eos + 1)
        self._prefix, self._suffix = around_text(tokenizer)
        # Every document ends with the end-of-text token anyway.
        if self._suffix[-1:] == [self._eos]:
            self._suffix.pop()
        around = {"prefix": self._prefix, "suffix": self._suffix}
        self.meta: dict[str, Any] = {
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": vocabulary,
            "eos_token": str(tokenizer.eos_token),
            "eos_token_id": self._eos,
            **{name: ids for name, ids in around.items() if ids},
        }
        self._dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
        self._shard: _Shard | None = None
        self.shards: list[dict[str, Any]] = []
        self.closed_digest, self.fingerprints = "", dict[str, str]()
        self._counts = Counter[str](documents=0, tokens=0, characters=0)
        self._digests = {"tokens": hashlib.sha256(), "documents": hashlib.sha256()}

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shard is not None:
            self._shard.open_files.close()

    @property
    def num_documents(self) -> int:
        """How many documents have been written."""
        return self._counts["documents"]

    def write(self, documents: Iterable[Document]) -> Iterator[None]:
        """Tokenise and write documents; yields after each batch of about a megabyte of text."""
        batch, size = list[Document](), 0
        for document in documents:
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
                self._write(batch)
                yield
                batch, size = [], 0
        self._write(batch)
        yield

    def _write(self, batch: list[Document]) -> None:
        encoder, ids = encoder_of(self._tokenizer), dict[str, list[int]]()
        texts, chats = list[Document](), list[Document]()
        for document in batch:
            if document.messages is None:
                texts.append(document)
            elif document.marks is None:
                chats.append(document)
            else:
                ids[document.doc_id] = encoder.encode_chat(document.text, document.marks)
        ways = (encoder.text, texts, self._prefix, self._suffix), (encoder.chat, chats, [], [])
        for backend, part, prefix, suffix in ways if chats else ways[:1]:
            encodings = backend.encode_batch_fast([d.text for d in part], add_special_tokens=False)
            for document, encoding in zip(part, encodings, strict=True):
                ids[document.doc_id] = [*prefix, *encoding.ids, *suffix]
        for document in batch:
            self.add(document, ids[document.doc_id])

    def add(self, document: Document, ids: list[int]) -> None:
        """Append one document; ``ids`` are its tokens without the end of text."""
        length = len(ids) + 1
        if self._shard is not None and self._shard.counts["tokens"] + length > self._shard_tokens:
            self._close_shard()
        if self._shard is None:
            self._shard = _Shard(self._directory, len(self.shards))
        tokens = np.array([*ids, self._eos], dtype=self._dtype).tobytes()
        document = self._digested(document)
        self._shard.add(document, tokens, self._counts["tokens"], length)
        self._digests["tokens"].update(tokens)
        self._counts.update(documents=1, tokens=length)

    def resume(
        self,
        shards: list[dict[str, Any]],
        digest: str,
        written: dict[str, str],
        documents: Iterator[Document],
    ) -> None:
        """Continue after the closed shards of an earlier writer, whose documents come first.

        ``shards``, ``digest`` and ``written`` are its shards, digest and fingerprints.
        """
        way_out = f"Remove {self._directory} to start again."
        layout.check_files(self._directory, shards, way_out)
        for name, expected in written.items():
            if fingerprints.of_file(self._directory / name) != expected:
                raise FormatError(
                    f"{self._directory / name} is damaged: it is not what was written. {way_out}"
                )
        self.fingerprints = dict(written)
        for number, shard in enumerate(shards):
            for document in islice(documents, shard["documents"]):
                self._digested(document)
            path = self._directory / layout.TOKENS.format(number)
            self._digests["tokens"].update(np.memmap(path, mode="r").data)
            self._counts.update(documents=shard["documents"], tokens=shard["tokens"])
        self.shards, self.closed_digest = list(shards), self._digests["documents"].hexdigest()
        if self.closed_digest != digest:
            raise InputError(
                f"the input documents have changed since {self._directory} was begun. Remove that "
                "directory to start again."
            )

    def _digested(self, document: Document) -> Document:
        """Add a document to the digest; return it with the normalised name of its split."""
        document, text = replace(document, split=document.part), document.text.encode()
        facts = [document.doc_id, document.source, document.domain]
        facts += [document.license, document.title, document.url, len(text)]
        # Omitted if absent: the fingerprints of older corpora do not include it.
        facts += [document.split] if document.split is not None else []
        self._digests["documents"].update(json_text(facts, ensure_ascii=True).encode() + text)
        self._counts["characters"] += len(document.text)
        return document

    def _close_shard(self) -> None:
        if self._shard is not None:
            shard = self._shard.close()
            self.shards.append(shard)
            for name in shard["files"]:
                self.fingerprints[name] = fingerprints.of_file(self._directory / name)
            self.closed_digest = self._digests["documents"].hexdigest()
            self._shard = None

    def finish(self, left_out: Mapping[str, int], **more: Any) -> None:
        """Close the last shard; write the tokenizer and ``corpus.json``.

        Args:
            left_out: the number of rows that are not in the corpus, by reason.
            more: further entries of ``corpus.json``, such as the input files.
        """
        self._close_shard()
        names = ["doc_id", "domain", "license", "length", "split"]
        paths = [self._directory / layout.DOCUMENTS.format(n) for n in range(len(self.shards))]
        documents = pa.concat_tables(pq.read_table(path, columns=names) for path in paths)
        split = self._split(documents)
        lengths = documents["length"].to_numpy()[layout.held_out(documents, split)]
        meta = {
            "format": layout.FORMAT,
            "version": layout.FORMAT_VERSION,
            "dtype": self._dtype.name,
            "tokenizer": self.meta,
            "left_out": dict(sorted(left_out.items())),
            "split": split,
            "counts": dict(self._counts) | {"skipped": sum(left_out.values())},
            "heldout": {"documents": len(lengths), "tokens": int(lengths.sum())},
            "domains": _totals(documents, "domain"),
            "licenses": _totals(documents, "license"),
            "shards": self.shards,
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
            **more,
        }
        self._tokenizer.save_pretrained(self._directory / layout.TOKENIZER_DIRECTORY)
        write_json(self._directory / layout.META_FILE, meta | {"digest": layout.digest(meta)})

    def _split(self, documents: pa.Table) -> dict[str, Any]:
        """Return the split rule, with a fraction that holds at least one document out.

        That of two or more documents, unless the fraction is 0 or all are stated to be in training.
        """
        fraction = self._heldout_fraction
        split: dict[str, Any] = {"rule": layout.SPLIT_RULE, "heldout_fraction": fraction}
        parts = documents["split"]
        if parts.null_count < len(parts):
            counts = {row["values"]: row["counts"] for row in parts.value_counts().to_pylist()}
            stated = {part: counts.get(part, 0) for part in ("train", "heldout")}
            split |= {"rule": layout.STATED_RULE, "stated": stated}
        ids = documents["doc_id"].filter(parts.is_null())
        if (
            fraction
            and len(documents) > 1
            and len(ids)
            and not layout.held_out(documents, split).any()
        ):
            split["heldout_fraction"] = math.nextafter(
                min(map(layout.split_key, ids.to_pylist())), 1.0
            )
        return split


def _totals(documents: pa.Table, name: str) -> list[dict[str, Any]]:
    """Return the number of documents and tokens by a column."""
    table = documents.group_by(name).aggregate([("length", "count"), ("length", "sum")])
    rows = table.select([name, "length_count", "length_sum"]).rename_columns(
        [name, "documents", "tokens"]
    )
    return sorted(rows.to_pylist(), key=lambda row: row[name] or "")


class _Shard:
    """The open files of one shard, and the rows of the next row group."""

    def __init__(self, directory: Path, number: int) -> None:
        names = (layout.TOKENS, layout.DOCUMENTS, layout.TEXTS)
        self._paths = [directory / name.format(number) for name in names]
        self.open_files = ExitStack()
        self._token_file = self.open_files.enter_context(self._paths[0].open("wb"))
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 6}
        options["write_page_checksum"] = True
        # Dictionaries and statistics of whole texts only waste space and time.
        plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
        kinds = ((layout.STORED_SCHEMA, options), (layout.TEXT_SCHEMA, options | plain))
        self._tables = [
            self.open_files.enter_context(pq.ParquetWriter(path, schema, **settings))
            for path, (schema, settings) in zip(self._paths[1:], kinds, strict=True)
        ]
        self.counts = {"documents": 0, "tokens": 0}
        self._rows, self._text_bytes = list[dict[str, Any]](), 0

    def add(self, document: Document, tokens: bytes, start: int, length: int) -> None:
        size = len(document.text.encode())
        if self._text_bytes + size > GROUP_BYTES or len(self._rows) == GROUP_DOCUMENTS:
            self._flush()
        row = {name: getattr(document, name) for name in ("doc_id", "text", *METADATA)}
        self._rows.append({**row, "start": start, "length": length})
        self._text_bytes += size
        self._token_file.write(tokens)
        self.counts["documents"] += 1
        self.counts["tokens"] += length

    def _flush(self) -> None:
        if self._rows:
            for table in self._tables:
                table.write_table(pa.Table.from_pylist(self._rows, schema=table.schema))
        self._rows, self._text_bytes = [], 0

    def close(self) -> dict[str, Any]:
        self._flush()
        self.open_files.close()
        return {**self.counts, "files": {path.name: path.stat().st_size for path in self._paths}}
