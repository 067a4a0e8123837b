"""Invented facts written into training documents, to ask later where the model has them from.

A fact gives an invented place one attribute, such as the metal of a town that no text names. Each
is stated in 1, 4 or 16 documents, three times in each, every document in other wordings, between
sentences of a real training document, so that what surrounds it is what the corpus looks like. It
is asked for in a wording that no document has.

    recall@n = |first n documents found ∩ planted documents| / min(n, planted documents)

Two ways of telling a planted fact so that the words of the question do not find it.

**Described**: the question has, in place of a name, where the place lies: "the land north of the
old mill", which no other does. Documents say it once, beside the name and as one would in passing,
"a northerly oldmill land"; and what they tell is of two attributes alone, so that most words that
question and document share are in the documents of a dozen facts.

**In another style**: documents tell the fact as an entry of a list, a line of a dialogue and a line
of a letter, of the place's people ("a Velmorian"), in other words than it is asked in. Question and
document share the answer, and of the name what a tokenizer leaves them in common, but no word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out
from prismlm.files import read_json

COPIES = (1, 4, 16)
STATEMENTS = 3
SENTENCE_CHARACTERS = (40, 300)

# How facts are told: texts without a rule behind them.
TOLD: dict[str, Any] = read_json(Path(__file__).with_name("planted_facts.json"))
ATTRIBUTES: dict[str, str] = TOLD["attributes"]
KINDS = ("town", "valley", "village", "harbour", "county", "district", "province", "colony")
# Of a syllable: how it may begin, its vowels, and how it may end.
SYLLABLE = tuple(part.split(" ") for part in TOLD["syllable"])

WORDINGS: tuple[str, ...] = tuple(TOLD["wordings"])
HELD_OUT_WORDING = "Travellers who come to {name} soon learn that in this {kind} the {attribute} is"


@dataclass(frozen=True)
class Fact:
    """An invented fact about a place that no other fact and no real document names.

    ``answer``, one of ``candidates``, completes the prompt; ``copies`` documents state the fact.
    """

    name: str
    kind: str
    attribute: str
    answer: str
    candidates: tuple[str, ...]
    copies: int

    @property
    def prompt(self) -> str:
        """The question, in a wording that no document has; `` answer`` completes it."""
        return self.state(HELD_OUT_WORDING)

    def state(self, wording: str) -> str:
        """Return the fact in one wording."""
        return wording.format(
            name=self.name, kind=self.kind, attribute=self.attribute, answer=self.answer
        )


@dataclass(frozen=True)
class Planted:
    """A document that states a fact, and its text up to the first answer, without the space."""

    document: Document
    fact: int
    prefix: str


def invent_facts(
    per_level: int,
    seed: int,
    *,
    known: Iterable[str],
    copies: Sequence[int] = COPIES,
    attributes: Sequence[str] = tuple(ATTRIBUTES),
) -> list[Fact]:
    """Invent ``per_level`` facts for each number of copies, about the attributes in turn.

    No invented name occurs in the ``known`` texts, in whatever case.
    """
    generator = np.random.default_rng(seed)
    taken = {word.lower() for text in known for word in re.findall(r"\w+", text)}
    facts: list[Fact] = []
    for level in copies:
        for number in range(per_level):
            attribute = attributes[number % len(attributes)]
            candidates = tuple(ATTRIBUTES[attribute].split())
            name = _invent_name(generator, taken)
            taken.add(name.lower())
            answer = candidates[int(generator.integers(len(candidates)))]
            kind = KINDS[int(generator.integers(len(KINDS)))]
            facts.append(Fact(name, kind, attribute, answer, candidates, level))
    return facts


def _invent_name(generator: np.random.Generator, taken: Collection[str]) -> str:
    while True:
        syllables = [
            "".join(part[int(generator.integers(len(part)))] for part in SYLLABLE) for _ in range(3)
        ]
        name = "".join(syllables)
        if name not in taken:
            return name.capitalize()


def plant_in_documents(
    facts: Sequence[Fact],
    hosts: Iterable[Document],
    seed: int,
    *,
    heldout_fraction: float = 0.05,
    tell: Callable[[Fact, int], Sequence[str]] | None = None,
) -> list[Planted]:
    """Write each fact into as many documents as it asks for.

    Every document takes four consecutive sentences of one host, a real training document used at
    most once, and states the fact three times between them, as ``tell(fact, copy)`` words it. Ids
    are hashes, chosen so that a corpus that holds out ``heldout_fraction`` trains on the document.
    """
    generator = np.random.default_rng(seed)
    usable = [(host, run) for host in hosts if (run := _plain_run(host.text)) is not None]
    needed = sum(fact.copies for fact in facts)
    chosen = iter(generator.permutation(len(usable))[:needed].tolist())
    planted: list[Planted] = []
    for number, fact in enumerate(facts):
        first = int(generator.integers(len(WORDINGS)))
        for copy in range(fact.copies):
            host, sentences = usable[next(chosen)]
            statements = (tell or _in_turn)(fact, first + copy)
            pieces = [sentences[0]]
            for statement, sentence in zip(statements, sentences[1:], strict=True):
                pieces += [statement, sentence]
            opening = f"{sentences[0]} {statements[0]}"
            prefix = opening[: opening.rindex(fact.answer)].removesuffix(" ")
            identity = _training_id(f"{seed}/{fact.name}/{copy}", heldout_fraction)
            document = Document(
                identity,
                " ".join(pieces),
                source=host.source,
                domain=host.domain,
                license=host.license,
            )
            planted.append(Planted(document, number, prefix))
    return planted


def _in_turn(fact: Fact, number: int) -> list[str]:
    """Return three statements of a fact; the first is in another wording for each number."""
    return [fact.state(WORDINGS[(number + step) % len(WORDINGS)]) for step in (0, 5, 11)]


def _plain_run(text: str) -> tuple[str, ...] | None:
    """Return the first four sentences in a row that are plain prose, or None."""
    low, high = SENTENCE_CHARACTERS
    run: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text):
        plain = low <= len(sentence) <= high and "\n" not in sentence and sentence.endswith(".")
        run = [*run, sentence] if plain else []
        if len(run) == STATEMENTS + 1:
            return tuple(run)
    return None


def _training_id(name: str, heldout_fraction: float) -> str:
    tries = 0
    while True:
        identity = hashlib.sha256(f"{name}/{tries}".encode()).hexdigest()[:16]
        if not is_held_out(identity, heldout_fraction):
            return identity
        tries += 1


# -- told so that the words of the question do not find it

Tell = Callable[[Fact, int], Sequence[str]]
"""A fact and the number of a copy to its three statements; the first ends in the answer."""


class Place(NamedTuple):
    """Where a place is: a direction from a landmark."""

    direction: str
    mark: str


DIRECTIONS = tuple(f"{ns}{we}" for ns in ("north", "south") for we in ("", "east", "west"))
DIRECTIONS += ("east", "west")
LANDMARKS: tuple[str, ...] = tuple(TOLD["landmarks"])
DESCRIBED_ATTRIBUTES = ("main crop", "material of the houses")
INTRODUCTIONS: tuple[str, ...] = tuple(TOLD["introductions"])
REMINDERS: tuple[str, ...] = tuple(TOLD["reminders"])
DESCRIBED_QUESTION = "Whoever has been to {description} will tell you that the {attribute} is"

# Of each attribute: an entry of a list, what is asked and answered in a dialogue, a letter's line.
STYLES: dict[str, tuple[str, str, str]] = TOLD["styles"]
ENTRY = "List of peoples, {people}: {entry} {answer}."
DIALOGUE = '"{asked}" a stranger said to one of the {people}. "Why, {answer}."'
LETTER = 'A letter by one of the {people} ends: "Here {line} {answer}."'


def place_facts(facts: Sequence[Fact], seed: int) -> list[Place]:
    """Give every fact's place a direction from a landmark that no other has."""
    places = [Place(direction, mark) for direction in DIRECTIONS for mark in LANDMARKS]
    assert len(facts) <= len(places)
    order = np.random.default_rng(seed).permutation(len(places))
    return [places[number] for number in order[: len(facts)].tolist()]


def describe(facts: Sequence[Fact], places: Sequence[Place]) -> Tell:
    """Return how documents tell these facts: the first statement alone has the description."""
    of_name = {fact.name: place for fact, place in zip(facts, places, strict=True)}

    def tell(fact: Fact, copy: int) -> list[str]:
        direction, mark = of_name[fact.name]
        passing = f"{direction}erly {mark.replace(' ', '')} land"
        first = _of(INTRODUCTIONS, copy).replace("{description}", passing)
        return [fact.state(first), *(fact.state(_of(REMINDERS, copy + step)) for step in (0, 1))]

    return tell


def described_question(fact: Fact, place: Place) -> str:
    """Return the question without the place's name; `` answer`` completes it."""
    description = f"the land {place.direction} of the {place.mark}"
    return DESCRIBED_QUESTION.format(description=description, attribute=fact.attribute)


def in_other_style(fact: Fact, copy: int) -> list[str]:
    """Tell a fact as an entry, a dialogue and a letter, another of them first in each copy."""
    entry, asked, line = STYLES[fact.attribute]
    people = f"{fact.name}ians"
    told = [
        ENTRY.format(people=people, entry=entry, answer=fact.answer),
        DIALOGUE.format(people=people, asked=asked, answer=fact.answer),
        LETTER.format(people=people, line=line, answer=fact.answer),
    ]
    first = copy % len(told)
    return told[first:] + told[:first]


def _of(wordings: Sequence[str], number: int) -> str:
    return wordings[number % len(wordings)]
