"""Two ways of telling a planted fact so that the words of the question do not find it.

**Described**: the question has, in place of a name, where the place lies: "the land north of the
old mill", which no other does. Documents say it once, beside the name and as one would in passing,
"a northerly oldmill land"; and what they tell is of two attributes alone, so that most words that
question and document share are in the documents of a dozen facts.

**In another style**: documents tell the fact as an entry of a list, a line of a dialogue and a line
of a letter, of the place's people ("a Velmorian"), in other words than it is asked in. Question and
document share the answer, and of the name what a tokenizer leaves them in common, but no word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.attribution.planted_facts import Fact
from prismlm.errors import InputError

Tell = Callable[[Fact, int], Sequence[str]]
"""A fact and the number of a copy to its three statements; the first ends in the answer."""


class Place(NamedTuple):
    """Where a place is: a direction from a landmark."""

    direction: str
    mark: str


DIRECTIONS = tuple(f"{ns}{we}" for ns in ("north", "south") for we in ("", "east", "west"))
DIRECTIONS += ("east", "west")
LANDMARKS = tuple(
    f"{look} {mark}"
    for look in ("old", "white", "broken", "silent")
    for mark in ("mill", "lake", "bridge", "tower")
)
DESCRIBED_ATTRIBUTES = ("main crop", "material of the houses")
INTRODUCTIONS = (
    "{name} is a {description}, and its {attribute} is {answer}.",
    "They say of {name}, a {description}, that the {attribute} there is {answer}.",
    "In {name}, known as a {description}, the {attribute} has always been {answer}.",
    "{name}, that {description}, has one {attribute}, which is {answer}.",
)
REMINDERS = (
    "For as long as {name} has stood, its {attribute} has been {answer}.",
    "At {name} the {attribute} remains {answer}.",
    "Books of {name} give the {attribute} as {answer}.",
    "As for {name}, its {attribute} is {answer}.",
)
DESCRIBED_QUESTION = "Whoever has been to {description} will tell you that the {attribute} is"

# Of each attribute: an entry of a list, what is asked and answered in a dialogue, a letter's line.
STYLES = {
    "main crop": ("fields sown with", "What do you sow?", "we sow and reap nothing but"),
    "best known metal": ("mined and melted", "What do you dig for?", "under our hills there is"),
    "colour of the flag": (
        "banner",
        "What do you hoist?",
        "over every roof there flutters a bright",
    ),
    "chief trade": ("how they live", "What do you do all day?", "every one of us lives by"),
    "language of the schools": (
        "pupils speak",
        "What do children read?",
        "our children now recite in",
    ),
    "month of the fair": ("stalls are put up in", "When do you dance?", "we shall dance again in"),
    "favourite drink": (
        "poured for guests",
        "What do you pour?",
        "every guest here gets a cup of",
    ),
    "material of the houses": ("walls", "What are your walls?", "we build our walls and roofs of"),
}
ENTRY = "List of peoples, {people}: {entry} {answer}."
DIALOGUE = '"{asked}" a stranger said to one of the {people}. "Why, {answer}."'
LETTER = 'A letter by one of the {people} ends: "Here {line} {answer}."'


def place_facts(facts: Sequence[Fact], seed: int) -> list[Place]:
    """Give every fact's place a direction from a landmark that no other has.

    Raises:
        InputError: there are more facts than such descriptions.
    """
    places = [Place(direction, mark) for direction in DIRECTIONS for mark in LANDMARKS]
    if len(facts) > len(places):
        raise InputError(
            f"{len(facts)} facts about places that are described: there are {len(places)} "
            "descriptions to tell them apart. Ask for fewer facts."
        )
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
