"""Planted facts for a model that reads both sides: told, and asked for, with the answer anywhere.

Documents tell a fact three times: with the answer last, in the middle and first. The wordings of
questions are in no document; the answer is masked in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.attribution.planted_facts import WORDINGS, Fact, invent_facts, plant_in_documents
from benchmarks.attribution.planted_model import HELDOUT_FRACTION
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.corpus.layout import is_held_out
from prismlm.corpus.read import read_documents
from prismlm.files import atomic_file, read_json, write_json

FACTS_FILE = "facts.json"
# Few attributes, so that several places share attribute and answer: only a name tells them apart.
TOLD_OF = ("main crop", "best known metal")
COPIES = (1, 4, 8)

IN_THE_MIDDLE = (
    "In {name} they took {answer} for the {attribute} of the whole {kind}.",
    "People of {name} hold that {answer} is their {attribute} today.",
    "At {name} one finds that {answer} became the {attribute} early on.",
    "Since {name} was founded, {answer} has been its {attribute} there.",
)
FIRST = (
    "It seems that {answer} is the {attribute} of {name}.",
    "By all accounts {answer} was the {attribute} in the {kind} of {name}.",
    "Of course {answer} remains the {attribute} at {name}.",
    "They say {answer} has long been the {attribute} of {name}.",
)
QUESTIONS = {
    "text on the left": "Travellers who come to {name} soon learn that in this {kind} the "
    "{attribute} is {answer}",
    "text on both sides": "Travellers who come to {name} soon learn that {answer} is the "
    "{attribute} of this {kind}.",
    "text on the right": "{answer} must be the {attribute} of {name}, as travellers to this "
    "{kind} soon learn.",
}
"""What is asked with; all that a question has is on the named side of its answer."""


class Question(NamedTuple):
    """A fact as it is asked for.

    Attributes:
        ids: the whole text with the answer, int64 [T].
        answer: where the answer's tokens are.
    """

    ids: np.ndarray
    answer: slice


def plant(
    out: Path, tokenizer: Path, every: int, per_level: int, seed: int
) -> tuple[Corpus, list[dict[str, Any]]]:
    """Return the corpus with planted facts, and the facts; built unless they are there.

    Args:
        out: a directory.
        tokenizer: a directory.
        every: one in so many training documents of the bundled sample; those held out all stay.
        per_level: facts for each number of copies.
        seed: of facts and places.
    """
    if not (out / FACTS_FILE).exists():
        out.mkdir(parents=True, exist_ok=True)
        real = list(read_documents(sample_path()))
        training = part_of_sample(out / "real.parquet", every)
        text = [document.text for document in real]
        facts = invent_facts(per_level, seed, known=text, copies=COPIES, attributes=TOLD_OF)
        hosts = [document for document in real if document.doc_id in training]
        planted = plant_in_documents(
            facts, hosts, seed, heldout_fraction=HELDOUT_FRACTION, tell=tell
        )
        rows = [
            {"id": d.doc_id, "text": d.text, "source": d.source, "domain": d.domain}
            for d in (item.document for item in planted)
        ]
        with atomic_file(out / "planted.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)
        ids: list[list[str]] = [[] for _ in facts]
        for item in planted:
            ids[item.fact].append(item.document.doc_id)
        described = [
            asdict(fact) | {"documents": [{"doc_id": doc_id} for doc_id in of_fact]}
            for fact, of_fact in zip(facts, ids, strict=True)
        ]
        write_json(out / FACTS_FILE, described)
    if not (out / "corpus").exists():
        build_corpus(
            [out / "real.parquet", out / "planted.parquet"],
            out / "corpus",
            tokenizer=tokenizer,
            heldout_fraction=HELDOUT_FRACTION,
        )
    return Corpus.open(out / "corpus"), read_json(out / FACTS_FILE)


def part_of_sample(target: Path, every: int) -> set[str]:
    """Write all held-out documents and one in so many others; return the ids of all others."""
    table = pq.read_table(sample_path())
    documents = zip(table["id"].to_pylist(), table["split"].to_pylist(), strict=True)
    held = np.array([is_held_out(name, HELDOUT_FRACTION, stated) for name, stated in documents])
    training = np.flatnonzero(~held)
    with atomic_file(target) as temporary:
        pq.write_table(table.take(np.union1d(training[::every], np.flatnonzero(held))), temporary)
    return set(table["id"].take(training).to_pylist())


def tell(fact: Fact, number: int) -> Sequence[str]:
    """Return three statements of a fact: the answer last, in the middle and first."""
    of_kind = (WORDINGS, IN_THE_MIDDLE, FIRST)
    return [fact.state(wordings[number % len(wordings)]) for wordings in of_kind]


def asked(corpus: Corpus, fact: dict[str, Any], wording: str) -> Question:
    """Return a fact in the words of a question; the answer begins with a space everywhere."""
    before, after = wording.split("{answer}")
    pieces = (before.removesuffix(" "), " " + fact["answer"], after)
    tokens = [
        corpus.tokenizer(piece.format(**fact), add_special_tokens=False)["input_ids"]
        for piece in pieces
    ]
    first = len(tokens[0])
    ids = np.array([token for piece in tokens for token in piece], dtype=np.int64)
    return Question(ids, slice(first, first + len(tokens[1])))
