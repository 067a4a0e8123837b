"""Invented facts in short documents among short real ones, in the tokens of a pretrained model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from benchmarks.attribution.planted_facts import STATEMENTS, invent_facts
from benchmarks.attribution.planted_model import HELDOUT_FRACTION, plant_kind
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.corpus.read import read_documents
from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.files import atomic_file, write_json

COPIES = (1, 4, 8)
# One, so that many facts have the same answer: who knows the phrase alone finds the wrong ones.
ATTRIBUTES = ("best known metal",)
# Characters: two such sentences and two statements of a fact fill a document.
SHORT = (40, 70)


def build(
    base: Path, out: Path, *, per_level: int, real: int, heldout: int, tokens: int, seed: int
) -> Corpus:
    """Write ``facts.json`` and ``corpus`` into ``out``.

    Args:
        base: whose tokenizer it has.
        out: the folder.
        per_level: facts in 1, in 4 and in 8 documents.
        real: documents of the bundled sample to train on.
        heldout: and to hold out.
        tokens: that are left of every document, from its beginning.
        seed: of facts and of the choice of documents.
    """
    out.mkdir(parents=True, exist_ok=True)
    every = list(read_documents(sample_path()))
    order = np.random.default_rng(seed).permutation(len(every)).tolist()
    shuffled = [every[number] for number in order]
    parts: dict[bool, list[Document]] = {True: [], False: []}
    for one in shuffled:
        parts[is_held_out(one.doc_id, HELDOUT_FRACTION, one.split)].append(one)
    held, train = parts[True][:heldout], parts[False]
    hosts = [short for one in train[real:] if (short := short_host(one)) is not None]
    texts = [one.text for one in every]
    facts = invent_facts(per_level, seed, known=texts, copies=COPIES, attributes=ATTRIBUTES)
    planted, described = plant_kind("plain", facts, hosts, seed)
    tokenizer = load_tokenizer(base)
    chosen = [cut(one, tokenizer, tokens) for one in [*train[:real], *held]]
    told = [cut(item.document, tokenizer, tokens) for item in planted]
    stated = [
        len(re.findall(rf"\b{facts[item.fact].answer}\b", one.text))
        for item, one in zip(planted, told, strict=True)
    ]
    assert min(stated) > 0, "a document is cut before it states its fact"
    write_parquet([*chosen, *told], out / "documents.parquet")
    write_json(out / "facts.json", {"statements": float(np.mean(stated)), "facts": described})
    return build_corpus(
        [out / "documents.parquet"],
        out / "corpus",
        tokenizer=base,
        heldout_fraction=HELDOUT_FRACTION,
        overwrite=True,
    )


def short_host(document: Document) -> Document | None:
    """Return a document of the first short sentences of another, or None if it has too few."""
    low, high = SHORT
    found = [
        sentence
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", document.text)
        if low <= len(sentence) <= high
        and "\n" not in sentence
        and sentence.endswith(".")
        and sentence[0].isupper()
    ]
    wanted = STATEMENTS + 1
    if len(found) < wanted:
        return None
    return replace(document, text=" ".join(found[:wanted]))


def cut(document: Document, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Document:
    """Return the document with as much of its text as its first tokens say."""
    read = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in read["offset_mapping"][:tokens]]
    return replace(document, text=document.text[: ends[-1]])


def write_parquet(documents: Sequence[Document], path: Path) -> None:
    """Write documents as a corpus is built from."""
    kept = ("text", "source", "domain", "license", "split")
    columns = {"id": "doc_id"} | {name: name for name in kept}
    values: dict[str, list[Any]] = {
        column: [getattr(one, attribute) for one in documents]
        for column, attribute in columns.items()
    }
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(values), temporary)
