"""Writing a corpus: parts, each with a shard of its own, and the directory that they become."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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
# Columns that decide on the split.
RULED = ["doc_id", "length", "split"]


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
    left_out: Mapping[str, int] | None = None,
) -> Generator[None]:
    """Write documents as a part of a corpus: a shard, digests of its documents, and counts.

    Yields after each row group, of about a megabyte of text. ``left_out`` counts documents by
    reason; it is looked at when all have been read.
    """
    described = describe_tokenizer(tokenizer)
    end, dtype = described["eos_token_id"], dtype_of(described)
    start = characters = 0
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
                rows.append(row := _row(document, start, len(ids) + 1))
                stored = np.array([*ids, end], dtype).tobytes()
                token_file.write(stored)
                digests.write(_digest(row, stored))
                start += len(ids) + 1
                characters += len(document.text)
            for writer in (table_writer, text_writer):
                writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema))
            yield
    write_json(directory / PART_FILE, {"characters": characters, "left_out": left_out or {}})


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
    left_out = Counter[str]()
    for summary in summaries:
        left_out.update(summary["left_out"])
    shards, tables, start, digest = list[dict[str, Any]](), list[pa.Table](), 0, hashlib.sha256()
    for part in parts:
        tables.append(table := pq.read_table(part / layout.DOCUMENTS.format(0), columns=RULED))
        tokens = int(table["length"].to_numpy().sum())
        if len(table):
            files = _add_shard(part, out, len(shards), start)
            shards.append({"documents": len(table), "tokens": tokens, "files": files})
        start += tokens
        with (part / DIGESTS_FILE).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    if not shards:
        raise InputError(f"No documents: no text in the input. Left out: {count_list(left_out)}.")
    described = describe_tokenizer(tokenizer)
    documents, skipped = pa.concat_tables(tables), sum(left_out.values())
    split, heldout = _split(documents, heldout_fraction)
    counts = {"documents": len(documents), "tokens": start}
    counts |= {"characters": sum(summary["characters"] for summary in summaries)}
    meta = {
        "format": layout.FORMAT,
        "version": layout.FORMAT_VERSION,
        "dtype": dtype_of(described).name,
        "tokenizer": {"fingerprint": fingerprint(tokenizer), **described},
        "left_out": dict(sorted(left_out.items())),
        "split": split,
        "counts": counts | {"skipped": skipped},
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


def _split(documents: pa.Table, fraction: float) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the split rule, and what it holds out: at least one document.

    That of two or more documents, unless the fraction is 0 or all are stated to be in training.
    """
    split: dict[str, Any] = {"rule": layout.SPLIT_RULE, "heldout_fraction": fraction}
    own = Counter(documents["split"].to_pylist())
    if own.total() > own[None]:
        split |= {"rule": layout.STATED_RULE}
        split["stated"] = {part: own[part] for part in ("train", "heldout")}
    held_out = layout.held_out(documents, split)
    if fraction and len(documents) > 1 and own[None] and not held_out.any():
        by_id = documents.filter(documents["split"].is_null())["doc_id"].to_pylist()
        split["heldout_fraction"] = math.nextafter(min(map(layout.split_key, by_id)), 1.0)
        held_out = layout.held_out(documents, split)
    lengths = documents["length"].to_numpy()
    return split, {"documents": int(held_out.sum()), "tokens": int(lengths[held_out].sum())}
