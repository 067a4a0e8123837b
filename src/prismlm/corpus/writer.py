"""Writing a corpus: parts, each with shards of its own, and the directory that they become."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prismlm.corpus import layout
from prismlm.corpus.documents import METADATA, Document
from prismlm.corpus.encode import around_text, encoder_of
from prismlm.corpus.read import count_list
from prismlm.corpus.tokenizer import fingerprint
from prismlm.errors import InputError
from prismlm.files import json_text, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1_000_000, 1024
# Size of a row group: one document reads in milliseconds.
GROUP_BYTES, GROUP_DOCUMENTS = 1_000_000, 4096
TABLE: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 6,
    "write_page_checksum": True,
}
# Files of a part: what the corpus says of it, and digests of its documents.
PART_FILE, DIGESTS_FILE = "part.json", "digests.bin"
SHARD_FILES = (layout.TOKENS, layout.DOCUMENTS, layout.TEXTS)


def describe_tokenizer(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the entry ``tokenizer`` of ``corpus.json``."""
    prefix, suffix = around_text(tokenizer)
    # Every document ends with the end-of-text token anyway.
    if suffix[-1:] == [tokenizer.eos_token_id]:
        suffix.pop()
    around = {"prefix": prefix, "suffix": suffix}
    return {
        "fingerprint": fingerprint(tokenizer),
        "vocab_size": max(len(tokenizer), int(tokenizer.eos_token_id) + 1),  # pyright: ignore
        "eos_token": str(tokenizer.eos_token),
        "eos_token_id": tokenizer.eos_token_id,
        **{name: ids for name, ids in around.items() if ids},
    }


def dtype_of(tokenizer: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the type of stored tokens, little endian."""
    return np.dtype("<u2" if tokenizer["vocab_size"] <= 2**16 else "<u4")


class PartWriter:
    """Writes documents, in order, as a part of a corpus: a directory with a shard.

    Use it as a context manager and end with :meth:`finish`.
    """

    def __init__(
        self, directory: Path, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float = 0.05
    ) -> None:
        self._directory, self._encoder = directory, encoder_of(tokenizer)
        self._heldout_fraction = heldout_fraction
        meta = describe_tokenizer(tokenizer)
        self._eos, self._dtype = meta["eos_token_id"], dtype_of(meta)
        self._prefix, self._suffix = meta.get("prefix", []), meta.get("suffix", [])
        self._counts = Counter[str](documents=0, tokens=0, characters=0)
        self._heldout, self._stated = Counter[str](documents=0, tokens=0), Counter[str]()
        # The smallest hash of an id, and the length of that document.
        self._least: list[float] | None = None
        self._digests = bytearray()
        # The rows of the next row group.
        self._rows, self._text_bytes = list[dict[str, Any]](), 0

    def __enter__(self) -> PartWriter:
        self._open = ExitStack()
        tokens, *tables = (self._directory / name.format(0) for name in SHARD_FILES)
        self._token_file = self._open.enter_context(tokens.open("wb"))
        # Dictionaries and statistics of whole texts only waste space and time.
        plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
        kinds = ((layout.STORED_SCHEMA, TABLE), (layout.TEXT_SCHEMA, TABLE | plain))
        self._tables = [
            self._open.enter_context(pq.ParquetWriter(path, schema, **settings))
            for path, (schema, settings) in zip(tables, kinds, strict=True)
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

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
        encoder = self._encoder
        plain = [document for document in batch if document.messages is None]
        chats = [document for document in batch if document.messages and document.marks is None]
        ids = {d.doc_id: encoder.encode_chat(d.text, d.marks) for d in batch if d.marks is not None}
        ways = [(encoder.text, plain, self._prefix, self._suffix)]
        ways += [(encoder.chat, chats, [], [])] if chats else []
        for backend, documents, prefix, suffix in ways:
            texts = [document.text for document in documents]
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            for document, encoding in zip(documents, encodings, strict=True):
                ids[document.doc_id] = [*prefix, *encoding.ids, *suffix]
        for document in batch:
            self.add(document, ids[document.doc_id])

    def add(self, document: Document, ids: list[int]) -> None:
        """Append one document; ``ids`` are its tokens without the end of text."""
        length = len(ids) + 1
        tokens = np.array([*ids, self._eos], dtype=self._dtype).tobytes()
        # The normalised name of its split.
        document, text = replace(document, split=document.part), document.text.encode()
        if self._text_bytes + len(text) > GROUP_BYTES or len(self._rows) == GROUP_DOCUMENTS:
            self._flush()
        row = {name: getattr(document, name) for name in ("doc_id", "text", *METADATA)}
        self._rows.append({**row, "start": self._counts["tokens"], "length": length})
        self._text_bytes += len(text)
        self._token_file.write(tokens)
        facts = [document.doc_id, document.source, document.domain, document.license]
        facts += [document.title, document.url, document.split, len(text)]
        digest = hashlib.sha256(json_text(facts, ensure_ascii=True).encode() + text)
        digest.update(tokens)
        self._digests += digest.digest()
        self._counts.update(documents=1, tokens=length, characters=len(document.text))
        key = layout.split_key(document.doc_id)
        if document.split is not None:
            self._stated[document.split] += 1
        elif self._least is None or key < self._least[0]:
            self._least = [key, length]
        if (document.split or (key < self._heldout_fraction and "heldout")) == "heldout":
            self._heldout.update(documents=1, tokens=length)

    def _flush(self) -> None:
        if self._rows:
            for table in self._tables:
                table.write_table(pa.Table.from_pylist(self._rows, schema=table.schema))
        self._rows, self._text_bytes = [], 0

    def finish(
        self, left_out: Mapping[str, int] | None = None, read: Mapping[str, int] | None = None
    ) -> None:
        """Write what the corpus will say of this part.

        Args:
            left_out: the number of rows that are not in the corpus, by reason.
            read: the number of documents by file.
        """
        self._flush()
        (self._directory / DIGESTS_FILE).write_bytes(self._digests)
        summary = {"counts": self._counts, "heldout": self._heldout, "stated": self._stated}
        summary |= {"least": self._least, "left_out": left_out or {}, "read": read or {}}
        write_json(self._directory / PART_FILE, summary)


def merge_parts(
    parts: Sequence[Path],
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    heldout_fraction: float,
    **more: Any,
) -> None:
    """Put the shards of all parts that have documents in ``out``, and write ``corpus.json``.

    Texts and tokens are not read, and not copied where the disk has hard links.

    Args:
        parts: directories of :class:`PartWriter`, in the order of their documents.
        out: an existing directory, best of the same file system.
        tokenizer: that of all parts.
        heldout_fraction: likewise.
        more: further entries of ``corpus.json``, such as the input files.
    """
    summaries = [read_json(part / PART_FILE) for part in parts]
    counts, left_out = _sum(summaries, "counts"), _sum(summaries, "left_out")
    if not counts["documents"]:
        raise InputError(f"No documents: no text in the input. Left out: {count_list(left_out)}.")
    shards, start, digest = list[dict[str, Any]](), 0, hashlib.sha256()
    for part, summary in zip(parts, summaries, strict=True):
        size = {name: summary["counts"][name] for name in ("documents", "tokens")}
        if size["documents"]:
            shards.append(size | {"files": _add_shard(part, out, len(shards), start)})
        start += size["tokens"]
        with (part / DIGESTS_FILE).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    described = describe_tokenizer(tokenizer)
    split, heldout = _split(summaries, counts["documents"], heldout_fraction)
    meta = {
        "format": layout.FORMAT,
        "version": layout.FORMAT_VERSION,
        "dtype": dtype_of(described).name,
        "tokenizer": described,
        "left_out": dict(sorted(left_out.items())),
        "split": split,
        "counts": {**counts, "skipped": sum(left_out.values())},
        "heldout": heldout,
        "shards": shards,
        "digests": {"documents": digest.hexdigest()},
        **more,
    }
    tokenizer.save_pretrained(out / layout.TOKENIZER_DIRECTORY)
    write_json(out / layout.META_FILE, meta | {"digest": layout.digest(meta)})


def _add_shard(part: Path, out: Path, number: int, start: int) -> dict[str, int]:
    """Put the shard of a part, which starts at ``start``, in ``out``; return its files' sizes."""
    files = dict[str, int]()
    for name in SHARD_FILES:
        source, target = part / name.format(0), out / name.format(number)
        if name == layout.DOCUMENTS:
            _shift(source, target, start)
        else:
            try:
                os.link(source, target)
            except OSError:  # a disk without hard links
                shutil.copyfile(source, target)
        files[target.name] = target.stat().st_size
    return files


def _shift(source: Path, target: Path, start: int) -> None:
    """Write a table of documents, by row group, with positions of the whole corpus."""
    schema = layout.STORED_SCHEMA
    with pq.ParquetFile(source) as old, pq.ParquetWriter(target, schema, **TABLE) as new:
        for group in range(old.num_row_groups):
            table = old.read_row_group(group)
            position, field = table.schema.get_field_index("start"), schema.field("start")
            shifted = pc.add(table["start"], start)  # pyright: ignore[reportAttributeAccessIssue]
            new.write_table(table.set_column(position, field, shifted))


def _sum(summaries: list[dict[str, Any]], name: str) -> Counter[str]:
    total = Counter[str]()
    for summary in summaries:
        total.update(summary[name])
    return total


def _split(
    summaries: list[dict[str, Any]], documents: int, fraction: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the split rule, and what it holds out: at least one document.

    That of two or more documents, unless the fraction is 0 or all are stated to be in training.
    """
    split: dict[str, Any] = {"rule": layout.SPLIT_RULE, "heldout_fraction": fraction}
    heldout, stated = dict(_sum(summaries, "heldout")), _sum(summaries, "stated")
    if stated:
        split |= {"rule": layout.STATED_RULE}
        split["stated"] = {part: stated[part] for part in ("train", "heldout")}
    least = min((summary["least"] for summary in summaries if summary["least"]), default=None)
    if fraction and documents > 1 and least and not heldout["documents"]:
        split["heldout_fraction"] = math.nextafter(least[0], 1.0)
        heldout = {"documents": 1, "tokens": least[1]}
    return split, heldout
