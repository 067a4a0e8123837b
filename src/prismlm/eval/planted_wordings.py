"""Two ways of telling a planted fact so that the words of the question do not find it.

**Described**: a place is introduced by its name and by a description, "the harbour north of the old
mill", which no other place has, though many have each of its words. The question has the
description alone.

**In another style**: documents tell the fact as an entry of a list, a line of a dialogue and a line
of a letter, of the place's people ("a Velmorian"), in other words than it is asked in. Question and
document share the answer, and of the name what a tokenizer leaves them in common, but no word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prismlm.errors import InputError
from prismlm.eval.planted_facts import KINDS, Fact

Tell = Callable[[Fact, int], Sequence[str]]
"""A fact and the number of a copy to its three statements; the first ends in the answer."""

DIRECTIONS = ("north", "south", "east", "west")
LANDMARKS = (
    "the old mill",
    "the salt lake",
    "the long bridge",
    "the burnt wood",
    "the white tower",
    "the two rivers",
)
INTRODUCTIONS = (
    "{name} is {description}, and its {attribute} is {answer}.",
    "They say of {name}, {description}, that the {attribute} there is {answer}.",
    "In {name}, known as {description}, the {attribute} has always been {answer}.",
    "{name}, or {description}, has one {attribute}, which is {answer}.",
)
REMINDERS = (
    "For as long as {name} has stood, its {attribute} has been {answer}.",
    "At {name} the {attribute} remains {answer}.",
    "The old books of {name} give the {attribute} as {answer}.",
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


def descriptions(facts: Sequence[Fact], seed: int) -> list[str]:
    """Give every fact's place a description that no other has, such as the town east of the mill.

    Raises:
        InputError: there are more places of one kind than descriptions.
    """
    generator = np.random.default_rng(seed)
    places = [f"{direction} of {mark}" for direction in DIRECTIONS for mark in LANDMARKS]
    left = {kind: generator.permutation(places).tolist() for kind in KINDS}
    found: list[str] = []
    for fact in facts:
        if not left[fact.kind]:
            raise InputError(
                f"more than {len(places)} facts about a {fact.kind}: there are no more "
                "descriptions to tell them apart. Ask for fewer facts."
            )
        found.append(f"the {fact.kind} {left[fact.kind].pop()}")
    return found


def describe(facts: Sequence[Fact], described: Sequence[str]) -> Tell:
    """Return how documents tell these facts: the first statement alone has the description."""
    of_name = {fact.name: text for fact, text in zip(facts, described, strict=True)}

    def tell(fact: Fact, copy: int) -> list[str]:
        introduction = INTRODUCTIONS[copy % len(INTRODUCTIONS)]
        first = introduction.replace("{description}", of_name[fact.name])
        return [fact.state(first), *(fact.state(_of(REMINDERS, copy + step)) for step in (0, 1))]

    return tell


def described_question(fact: Fact, description: str) -> str:
    """Return the question without the place's name; `` answer`` completes it."""
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
