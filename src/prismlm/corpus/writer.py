"""Writing a corpus directory: documents and their tokens as shards, and ``corpus.json``.

Memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus import layout
from prismlm.corpus.chat import encode_chat, has_marks
from prismlm.corpus.documents import METADATA, Document
from prismlm.corpus.encode import around_text, encoder_of
from prismlm.corpus.tokenizer import fingerprint
from prismlm.errors import FormatError, InputError
from prismlm.files import json_text, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1_000_000, 1024
# Of a row group, so that one document reads in milliseconds.
GROUP_BYTES, GROUP_DOCUMENTS = 1_000_000, 4096
ROWS_AT_ONCE = 64
# What a shard keeps of a document.
DOCUMENT = ("doc_id", "text", *METADATA)


class CorpusWriter:
    """Writes documents, in order, as a corpus directory.

    A document is never split between shards: a shard is closed before the document that would
    take it beyond ``shard_tokens``. Use it as a context manager and end with :meth:`finish`.

    Attributes:
        meta: what ``corpus.json`` says of the tokenizer.
        shards: those that are closed: their documents, tokens and files with sizes.
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
        self.meta = {
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": vocabulary,
            "eos_token": str(tokenizer.eos_token),
            "eos_token_id": self._eos,
        }
        self._prefix, self._suffix = around_text(tokenizer)
        # A document ends with the end of text in any case.
        if self._suffix[-1:] == [self._eos]:
            self._suffix.pop()
        around = {"prefix": self._prefix, "suffix": self._suffix}
        self.meta |= {name: ids for name, ids in around.items() if ids}
        self._dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
        self._shard: _Shard | None = None
        self.shards: list[dict[str, Any]] = []
        self._counts = Counter[str]()
        self._heldout = Counter[str](documents=0, tokens=0)
        # The key and length of the document that is held out where the fraction holds out none.
        self._first_to_hold_out = (1.0, 0)
        self._stated = Counter[str]()
        self._groups = {"domain": defaultdict(Counter[str]), "license": defaultdict(Counter[str])}
        self._digests = {"tokens": hashlib.sha256(), "documents": hashlib.sha256()}

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shard is not None:
            self._shard.files.close()

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
        encoder = encoder_of(self._tokenizer)
        texts, chats, ids = list[Document](), list[Document](), dict[str, list[int]]()
        for document in batch:
            if document.messages is None:
                texts.append(document)
            elif has_marks(self._tokenizer, document.messages):
                ids[document.doc_id] = encode_chat(self._tokenizer, document.messages)
            else:
                # All special tokens are the template's.
                chats.append(document)
        around = self._prefix, self._suffix
        for some, (before, after) in ((texts, around), (chats, ([], []))):
            if not some:
                continue
            backend = encoder.text if some is texts else encoder.chat
            encoded = backend.encode_batch_fast([d.text for d in some], add_special_tokens=False)
            for document, one in zip(some, encoded, strict=True):
                ids[document.doc_id] = [*before, *one.ids, *after]
        for document in batch:
            self.add(document, ids[document.doc_id])

    def add(self, document: Document, ids: list[int]) -> None:
        """Append one document; ``ids`` are its tokens without the end of text."""
        document = replace(document, split=document.part)
        length = len(ids) + 1
        if self._shard is not None and self._shard.tokens + length > self._shard_tokens:
            self._close_shard()
        if self._shard is None:
            self._shard = _Shard(self._directory, len(self.shards))
        tokens = np.array([*ids, self._eos], dtype=self._dtype).tobytes()
        self._shard.add(document, tokens, self._counts["tokens"], length)
        self._count(document, tokens, length)

    def resume(self, shards: list[dict[str, Any]], documents: Iterator[Document]) -> None:
        """Take shards that an earlier writer closed, and their part of ``documents``."""
        layout.check_files(self._directory, shards)
        for number, shard in enumerate(shards):
            tables = (layout.DOCUMENTS.format(number), layout.TEXTS.format(number))
            rows = zip(*(_rows(self._directory / name) for name in tables), strict=True)
            with (self._directory / layout.TOKENS.format(number)).open("rb") as tokens:
                for row, text in rows:
                    document = next(documents, None)
                    if document is not None:
                        document = replace(document, split=document.part)
                    kept = {name: (row | text)[name] for name in DOCUMENT}
                    if document is None or kept != {n: getattr(document, n) for n in DOCUMENT}:
                        raise InputError(
                            f"what is read has changed since {self._directory} was begun: the "
                            f"document {row['doc_id']!r} is missing, elsewhere or another. Remove "
                            "that directory to start anew."
                        )
                    part = tokens.read(row["length"] * self._dtype.itemsize)
                    self._count(document, part, row["length"])
            self.shards.append(shard)

    def _count(self, document: Document, tokens: bytes, length: int) -> None:
        text = document.text.encode()
        facts = [document.doc_id, document.source, document.domain]
        facts += [document.license, document.title, document.url, len(text)]
        # Only where there is one: corpora without any keep the fingerprint that they always had.
        facts += [document.split] if document.split is not None else []
        self._digests["tokens"].update(tokens)
        self._digests["documents"].update(json_text(facts, ensure_ascii=True).encode() + text)
        size = Counter(documents=1, tokens=length)
        self._counts += size + Counter(characters=len(document.text))
        if document.split is not None:
            self._stated[document.split] += 1
        else:
            key = (layout.split_key(document.doc_id), length)
            self._first_to_hold_out = min(self._first_to_hold_out, key)
        if layout.is_held_out(document.doc_id, self._heldout_fraction, document.split):
            self._heldout.update(size)
        for name, groups in self._groups.items():
            groups[getattr(document, name)].update(size)

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.shards.append(self._shard.close())
            self._shard = None

    def finish(self, left_out: Mapping[str, int], **more: Any) -> None:
        """Close the last shard; write the tokenizer and ``corpus.json``.

        Of two or more documents at least one is held out, unless the held-out fraction is 0: where
        it is too small for that, the fraction becomes the least that holds one out.

        Args:
            left_out: how many rows are not in the corpus, by the reason.
            more: what else ``corpus.json`` says, such as the files read.
        """
        self._close_shard()
        key, length = self._first_to_hold_out
        none_held_out = self._counts["documents"] > 1 and not self._heldout["documents"]
        if none_held_out and 0 < self._heldout_fraction <= key < 1:
            self._heldout_fraction = math.nextafter(key, 1.0)
            self._heldout = Counter(documents=1, tokens=length)
        split: dict[str, Any] = {"rule": layout.STATED_RULE if self._stated else layout.SPLIT_RULE}
        split["heldout_fraction"] = self._heldout_fraction
        if self._stated:
            split["stated"] = {part: self._stated[part] for part in ("train", "heldout")}
        domains, licenses = (
            [{name: value, **counts} for value, counts in sorted(groups.items(), key=_first)]
            for name, groups in self._groups.items()
        )
        names = ("documents", "tokens", "characters")
        meta = {
            "format": layout.FORMAT,
            "version": layout.FORMAT_VERSION,
            "dtype": self._dtype.name,
            "tokenizer": self.meta,
            "left_out": dict(sorted(left_out.items())),
            "split": split,
            "counts": {name: self._counts[name] for name in names}
            | {"skipped": sum(left_out.values())},
            "heldout": dict(self._heldout),
            "domains": domains,
            "licenses": licenses,
            "shards": self.shards,
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
            **more,
        }
        self._tokenizer.save_pretrained(self._directory / layout.TOKENIZER_DIRECTORY)
        write_json(self._directory / layout.META_FILE, meta | {"digest": layout.digest(meta)})


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of a closed shard."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise FormatError(
            f"{path} is damaged ({error}). Remove {path.parent} to start anew."
        ) from error


def _first(group: tuple[str | None, Any]) -> str:
    return group[0] or ""


class _Shard:
    def __init__(self, directory: Path, number: int) -> None:
        names = (layout.TOKENS, layout.DOCUMENTS, layout.TEXTS)
        self._paths = [directory / name.format(number) for name in names]
        self.files = ExitStack()
        self._token_file = self.files.enter_context(self._paths[0].open("wb"))
        how: dict[str, Any] = {"compression": "zstd", "compression_level": 6}
        how["write_page_checksum"] = True
        # Dictionaries and statistics of whole texts only cost space and time to read past.
        plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
        self._document_table = self.files.enter_context(
            pq.ParquetWriter(self._paths[1], layout.STORED_SCHEMA, **how)
        )
        self._text_table = self.files.enter_context(
            pq.ParquetWriter(self._paths[2], layout.TEXT_SCHEMA, **how, **plain)
        )
        self.tokens = self._documents = self._text_bytes = 0
        self._rows: list[dict[str, Any]] = []

    def add(self, document: Document, tokens: bytes, start: int, length: int) -> None:
        size = len(document.text.encode())
        if self._text_bytes + size > GROUP_BYTES or len(self._rows) == GROUP_DOCUMENTS:
            self._flush()
        facts = {name: getattr(document, name) for name in DOCUMENT}
        self._rows.append({**facts, "start": start, "length": length})
        self._text_bytes += size
        self._token_file.write(tokens)
        self.tokens += length
        self._documents += 1

    def _flush(self) -> None:
        if self._rows:
            for table in (self._document_table, self._text_table):
                table.write_table(pa.Table.from_pylist(self._rows, schema=table.schema))
        self._rows, self._text_bytes = [], 0

    def close(self) -> dict[str, Any]:
        self._flush()
        self.files.close()
        files = {path.name: path.stat().st_size for path in self._paths}
        return {"documents": self._documents, "tokens": self.tokens, "files": files}
