"""Writing a corpus directory: documents and their tokens as shards, and ``corpus.json``."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
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
# Columns that corpus.json counts by, with whether a document is held out.
GROUPS = ("domain", "license", "split")


class CorpusWriter:
    """Writes documents, in order, as a corpus directory.

    A document is never split between shards: a shard is closed before the document that would
    take it beyond ``shard_tokens``. Use it as a context manager and end with :meth:`finish`.

    Attributes:
        meta: what ``corpus.json`` says of the tokenizer.
        shards: those that are closed: their documents, tokens and files with sizes.
        closed_digest: of the documents of these shards.
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
        self.closed_digest = ""
        self._counts = Counter[str](documents=0, tokens=0, characters=0)
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
        encoder, ids = encoder_of(self._tokenizer), dict[str, list[int]]()
        texts, chats = list[Document](), list[Document]()
        for document in batch:
            if document.messages is None:
                texts.append(document)
            elif has_marks(self._tokenizer, document.messages):
                ids[document.doc_id] = encode_chat(self._tokenizer, document.messages)
            else:
                # All special tokens are the template's.
                chats.append(document)
        ways = (encoder.text, texts, self._prefix, self._suffix), (encoder.chat, chats, [], [])
        for backend, some, before, after in ways if chats else ways[:1]:
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

    def resume(
        self, shards: list[dict[str, Any]], digest: str, documents: Iterator[Document]
    ) -> None:
        """Take the shards and ``closed_digest`` of an earlier writer, and their ``documents``."""
        layout.check_files(self._directory, shards)
        for number in range(len(shards)):
            lengths = self._documents(number, "length")["length"].to_pylist()
            with (self._directory / layout.TOKENS.format(number)).open("rb") as tokens:
                for length, document in zip(lengths, documents, strict=False):
                    part = tokens.read(length * self._dtype.itemsize)
                    self._count(replace(document, split=document.part), part, length)
        self.shards, self.closed_digest = list(shards), self._digests["documents"].hexdigest()
        if self.closed_digest != digest:
            raise InputError(
                f"the documents that are read have changed since {self._directory} was begun. "
                "Remove that directory to start anew."
            )

    def _documents(self, shard: int, *columns: str) -> pa.Table:
        """Return columns of the documents of a closed shard."""
        path = self._directory / layout.DOCUMENTS.format(shard)
        try:
            return pq.read_table(path, columns=list(columns), page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(
                f"{path} is damaged ({error}). Remove {self._directory} to start anew."
            ) from error

    def _count(self, document: Document, tokens: bytes, length: int) -> None:
        text = document.text.encode()
        facts = [document.doc_id, document.source, document.domain]
        facts += [document.license, document.title, document.url, len(text)]
        # Only where there is one: corpora without any keep the fingerprint that they always had.
        facts += [document.split] if document.split is not None else []
        self._digests["tokens"].update(tokens)
        self._digests["documents"].update(json_text(facts, ensure_ascii=True).encode() + text)
        self._counts.update(documents=1, tokens=length, characters=len(document.text))

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.shards.append(self._shard.close())
            self.closed_digest = self._digests["documents"].hexdigest()
            self._shard = None

    def finish(self, left_out: Mapping[str, int], **more: Any) -> None:
        """Close the last shard; write the tokenizer and ``corpus.json``.

        Args:
            left_out: how many rows are not in the corpus, by the reason.
            more: what else ``corpus.json`` says, such as the files read.
        """
        self._close_shard()
        split, groups = self._split()
        held_out = [row for row in _summed(groups, "held_out") if row.pop("held_out")]
        meta = {
            "format": layout.FORMAT,
            "version": layout.FORMAT_VERSION,
            "dtype": self._dtype.name,
            "tokenizer": self.meta,
            "left_out": dict(sorted(left_out.items())),
            "split": split,
            "counts": dict(self._counts) | {"skipped": sum(left_out.values())},
            "heldout": held_out[0] if held_out else {"documents": 0, "tokens": 0},
            "domains": _summed(groups, "domain"),
            "licenses": _summed(groups, "license"),
            "shards": self.shards,
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
            **more,
        }
        self._tokenizer.save_pretrained(self._directory / layout.TOKENIZER_DIRECTORY)
        write_json(self._directory / layout.META_FILE, meta | {"digest": layout.digest(meta)})

    def _split(self) -> tuple[dict[str, Any], pa.Table]:
        """Return the rule of the split, and the documents and tokens of each group under it.

        Of two or more documents at least one is held out, unless the held-out fraction is 0: where
        it is too small for that, the fraction becomes the least that holds one out.
        """
        fraction, groups = self._heldout_fraction, self._grouped(self._heldout_fraction)
        if (
            fraction
            and self._counts["documents"] > 1
            and True not in groups["held_out"].to_pylist()
        ):
            key = min(map(self._least_key, range(len(self.shards))))
            if key < 1:
                fraction = math.nextafter(key, 1.0)
                groups = self._grouped(fraction)
        stated = {row["split"]: row["documents"] for row in _summed(groups, "split")}
        split: dict[str, Any] = {"rule": layout.SPLIT_RULE, "heldout_fraction": fraction}
        if stated.keys() - {None}:
            parts = {part: stated.get(part, 0) for part in ("train", "heldout")}
            split |= {"rule": layout.STATED_RULE, "stated": parts}
        return split, groups

    def _grouped(self, heldout_fraction: float) -> pa.Table:
        """Return documents and tokens by ``GROUPS`` and ``held_out``; memory is that of a shard."""
        split, found = {"heldout_fraction": heldout_fraction, "stated": True}, list[pa.Table]()
        for shard in range(len(self.shards)):
            table = self._documents(shard, "doc_id", "length", *GROUPS)
            held_out = pa.array(layout.held_out(table, split))
            groups = table.append_column("held_out", held_out).group_by([*GROUPS, "held_out"])
            sizes = groups.aggregate([("length", "count"), ("length", "sum")])
            found.append(sizes.select([*GROUPS, "held_out", "length_count", "length_sum"]))
        return pa.concat_tables(found).rename_columns([*GROUPS, "held_out", "documents", "tokens"])

    def _least_key(self, shard: int) -> float:
        """Return the least key of the documents that do not say their part; 1 without any."""
        table = self._documents(shard, "doc_id", "split")
        ids = table.filter(table["split"].is_null())["doc_id"].to_pylist()
        return min(map(layout.split_key, ids), default=1.0)


def _summed(groups: pa.Table, column: str) -> list[dict[str, Any]]:
    """Return documents and tokens of each value of a column."""
    sums = groups.group_by(column).aggregate([("documents", "sum"), ("tokens", "sum")])
    rows = sums.select([column, "documents_sum", "tokens_sum"])
    named = rows.rename_columns([column, "documents", "tokens"]).to_pylist()
    return sorted(named, key=lambda row: str(row[column] or ""))


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
        self._tables = [
            self.files.enter_context(pq.ParquetWriter(path, schema, **options))
            for path, schema, options in (
                (self._paths[1], layout.STORED_SCHEMA, how),
                (self._paths[2], layout.TEXT_SCHEMA, how | plain),
            )
        ]
        self.tokens = self._documents = self._text_bytes = 0
        self._rows: list[dict[str, Any]] = []

    def add(self, document: Document, tokens: bytes, start: int, length: int) -> None:
        size = len(document.text.encode())
        if self._text_bytes + size > GROUP_BYTES or len(self._rows) == GROUP_DOCUMENTS:
            self._flush()
        facts = {name: getattr(document, name) for name in ("doc_id", "text", *METADATA)}
        self._rows.append({**facts, "start": start, "length": length})
        self._text_bytes += size
        self._token_file.write(tokens)
        self.tokens += length
        self._documents += 1

    def _flush(self) -> None:
        if self._rows:
            for table in self._tables:
                table.write_table(pa.Table.from_pylist(self._rows, schema=table.schema))
        self._rows, self._text_bytes = [], 0

    def close(self) -> dict[str, Any]:
        self._flush()
        self.files.close()
        files = {path.name: path.stat().st_size for path in self._paths}
        return {"documents": self._documents, "tokens": self.tokens, "files": files}
