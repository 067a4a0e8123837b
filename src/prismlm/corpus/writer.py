"""Writing a corpus: parts, each with a shard of its own, and the directory that they become."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.documents import METADATA, Document
from prismlm.corpus.encode import around_text, encoder_of
from prismlm.corpus.read import count_list
from prismlm.corpus.tokenizer import fingerprint
from prismlm.errors import InputError
from prismlm.files import json_text, link_or_copy, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Size of a row group: one document reads in milliseconds.
GROUP_BYTES, GROUP_DOCUMENTS = 1_000_000, 4096
TABLE: dict[str, Any] = {"compression": "zstd", "compression_level": 6}
TABLE |= {"write_page_checksum": True}
# Dictionaries and statistics of whole texts only waste space and time.
TEXT_TABLE: dict[str, Any] = TABLE | {"use_dictionary": False, "write_statistics": False}
# Files of a part: what the corpus says of it, and digests of its documents.
PART_FILE, DIGESTS_FILE = "part.json", "digests.bin"


def describe_tokenizer(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the entry ``tokenizer`` of ``corpus.json``, without its fingerprint."""
    prefix, suffix = around_text(tokenizer)
    # Every document ends with the end-of-text token anyway.
    if suffix[-1:] == [tokenizer.eos_token_id]:
        suffix.pop()
    around = {"prefix": prefix, "suffix": suffix}
    return {
        "vocab_size": max(len(tokenizer), int(tokenizer.eos_token_id) + 1),  # pyright: ignore
        "eos_token": str(tokenizer.eos_token),
        "eos_token_id": tokenizer.eos_token_id,
        **{name: ids for name, ids in around.items() if ids},
    }


def dtype_of(described: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the type of stored tokens, little endian."""
    return np.dtype("<u2" if described["vocab_size"] <= 2**16 else "<u4")


def write_part(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    documents: Iterable[Document],
    heldout_fraction: float = 0.05,
    *,
    left_out: Mapping[str, int] | None = None,
    read: Mapping[str, int] | None = None,
) -> Iterator[None]:
    """Write documents as a part of a corpus: a shard, and what the corpus will say of it.

    Yields after each row group, of about a megabyte of text. ``left_out`` (by reason) and ``read``
    (by file) count documents; they are looked at when all have been read.
    """
    described = describe_tokenizer(tokenizer)
    end, dtype = described["eos_token_id"], dtype_of(described)
    counts = Counter[str](documents=0, tokens=0, characters=0)
    heldout, stated = Counter[str](documents=0, tokens=0), Counter[str]()
    least = [1.0, 0]
    tokens, table, texts = (
        directory / name.format(0) for name in (layout.TOKENS, layout.DOCUMENTS, layout.TEXTS)
    )
    with (
        tokens.open("wb") as token_file,
        (directory / DIGESTS_FILE).open("wb") as digests,
        pq.ParquetWriter(table, layout.STORED_SCHEMA, **TABLE) as table_writer,
        pq.ParquetWriter(texts, layout.TEXT_SCHEMA, **TEXT_TABLE) as text_writer,
    ):
        for group in _row_groups(documents):
            rows = list[dict[str, Any]]()
            for document, ids in zip(group, _encode(tokenizer, described, group), strict=True):
                length, split = len(ids) + 1, document.part
                rows.append(row := _row(document, counts["tokens"], length))
                stored = np.array([*ids, end], dtype).tobytes()
                token_file.write(stored)
                digests.write(_digest(row, stored))
                counts.update(documents=1, tokens=length, characters=len(document.text))
                if layout.is_held_out(document.doc_id, heldout_fraction, split):
                    heldout.update(documents=1, tokens=length)
                if split is None:
                    least = min(least, [layout.split_key(document.doc_id), length])
                else:
                    stated[split] += 1
            for writer in (table_writer, text_writer):
                writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))
            yield
    summary = {"counts": counts, "heldout": heldout, "stated": stated, "least": least}
    summary |= {"left_out": left_out or {}, "read": read or {}}
    write_json(directory / PART_FILE, summary)


def _row_groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = list[Document](), 0
    for document in documents:
        more = len(document.text.encode())
        if group and (size + more > GROUP_BYTES or len(group) == GROUP_DOCUMENTS):
            yield group
            group, size = [], 0
        group.append(document)
        size += more
    if group:
        yield group


def _encode(
    tokenizer: PreTrainedTokenizerFast, described: Mapping[str, Any], documents: list[Document]
) -> list[list[int]]:
    """Return the tokens of each document, without the end of text."""
    encoder = encoder_of(tokenizer)
    ids = {d.doc_id: encoder.encode_chat(d.text, d.marks) for d in documents if d.marks is not None}
    plain = [document for document in documents if document.messages is None]
    chats = [document for document in documents if document.messages and document.marks is None]
    ways = [(encoder.text, plain, described.get("prefix", []), described.get("suffix", []))]
    if chats:  # otherwise their encoder, a copy of the tokenizer, is not made
        ways.append((encoder.chat, chats, [], []))
    for backend, some, prefix, suffix in ways:
        texts = [document.text for document in some]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for document, encoding in zip(some, encodings, strict=True):
            ids[document.doc_id] = [*prefix, *encoding.ids, *suffix]
    return [ids[document.doc_id] for document in documents]


def _row(document: Document, start: int, length: int) -> dict[str, Any]:
    row = {name: getattr(document, name) for name in ("doc_id", "text", *METADATA)}
    return row | {"split": document.part, "start": start, "length": length}


def _digest(row: Mapping[str, Any], tokens: bytes) -> bytes:
    text = row["text"].encode()
    facts = [*(row[name] for name in ("doc_id", *METADATA)), len(text)]
    return hashlib.sha256(json_text(facts, ensure_ascii=True).encode() + text + tokens).digest()


def merge_parts(
    parts: Sequence[Path],
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    heldout_fraction: float,
    **more: Any,
) -> None:
    """Put the shards of all parts that have documents in ``out``, and write ``corpus.json``.

    Parts are in the order of their documents. Texts and tokens are not read, and not copied where
    the disk has hard links. ``more`` are further entries of ``corpus.json``.
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
        "tokenizer": {"fingerprint": fingerprint(tokenizer), **described},
        "left_out": dict(sorted(left_out.items())),
        "split": split,
        "counts": {**counts, "skipped": sum(left_out.values())},
        "heldout": heldout,
        "shards": shards,
        "digests": {"documents": digest.hexdigest()},
        **more,
    }
    tokenizer.save_pretrained(out / layout.TOKENIZER_DIRECTORY)
    write_json(out / layout.META_FILE, meta | {"digest": fingerprints.of_json(meta)})


def _add_shard(part: Path, out: Path, number: int, start: int) -> dict[str, int]:
    """Put the shard of a part, which starts at ``start``, in ``out``; return its files' sizes."""
    files = dict[str, int]()
    for name in (layout.TOKENS, layout.DOCUMENTS, layout.TEXTS):
        source, target = part / name.format(0), out / name.format(number)
        if name == layout.DOCUMENTS:
            _shift(source, target, start)
        else:
            link_or_copy(source, target)
        files[target.name] = target.stat().st_size
    return files


def _shift(source: Path, target: Path, start: int) -> None:
    """Write a table of documents, by row group, with positions of the whole corpus."""
    schema = layout.STORED_SCHEMA
    position = schema.get_field_index("start")
    with pq.ParquetFile(source) as old, pq.ParquetWriter(target, schema, **TABLE) as new:
        for group in range(old.num_row_groups):
            table = old.read_row_group(group)
            shifted = pc.add(table["start"], start)  # pyright: ignore[reportAttributeAccessIssue]
            new.write_table(table.set_column(position, schema.field(position), shifted))


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
    # The smallest hash of an id, and the length of that document; 0 where all state their split.
    key, length = min(summary["least"] for summary in summaries)
    if fraction and documents > 1 and length and not heldout["documents"]:
        split["heldout_fraction"] = math.nextafter(key, 1.0)
        heldout = {"documents": 1, "tokens": length}
    return split, heldout
