"""Slices that put another word, or another form of it, in a word's place."""

from __future__ import annotations

import random
import re
from collections.abc import Container
from functools import cache

from prismlm.eval.perturbations.word_lists import Change, any_of, cased, replaced, words

MOST_SYNONYMS = 3
# Of sentences with one word to change, those that need not wait for the others.
SINGLES = 0.05
WORD = re.compile(r"(?<![\w'-])[A-Za-z]+(?![\w'-])")
PREPOSITIONS = (
    "in|on|at|of|to|from|for|with|by|about|into|over|under|through|between|against|during|without"
    "|after|before|behind|near|across|around|toward|towards|inside|within"
)
# What follows a noun that stands alone: no other noun, which it would belong to.
ENDS = rf"(?=[.,;!?]| (?:{PREPOSITIONS}|and|or|but|when|where|while|because|as)\b)"
THE = "the|my|your|his|her|our|their|its"
# After these the form of the verb is theirs.
HELPS = re.compile(
    "(?:do|does|did|will|would|can|could|shall|should|may|might|must|lets?|makes?|made|see|saw|has"
    "|have|had|got|am|is|are|was|were|help(?:ed)?|than|as|if|wish|though|and|not|or|to|.*n't)? ?",
    re.IGNORECASE,
)
# Another tense would contradict them, or what another clause says.
DATED = re.compile(
    r"\b(yesterday|ago|last|tomorrow|now|would|could|used|was|were|had|today|currently"
    r"|will|can|is|are|am|be|if|until|when|while|since)\b|'(ll|m|re|s|ve)\b|\b([12]\d{3})\b",
    re.IGNORECASE,
)


def synonym(sentence: str, draw: random.Random) -> Change | None:
    """Put synonyms of the first sense in the place of one to three words."""
    lists = words().synonyms
    found = _known(sentence, lists)
    if not found:
        return None
    # Few sentences hold two or three: those that do are mostly used for it, and come first.
    many = min(len(found), MOST_SYNONYMS if draw.random() < 0.75 else 1)
    spare = len(found) == 1 and draw.random() > SINGLES
    chosen = sorted(draw.sample(found, many), key=lambda word: -word.start())
    text = sentence
    for word in chosen:
        other = cased(draw.choice(lists[word[0].lower()]), word[0])
        changed = replaced(text, word, other)
        if changed is None:
            return None
        text = changed
    return Change(text, chosen[-1][0].lower(), spare)


def spelling(sentence: str, draw: random.Random) -> Change | None:
    """Spell one word as American English does, or as British English does."""
    lists = words().spelling
    found = _known(sentence, lists)
    if not found:
        return None
    word = draw.choice(found)
    text = replaced(sentence, word, cased(lists[word[0].lower()], word[0]))
    return None if text is None else Change(text, min(word[0].lower(), lists[word[0].lower()]))


def _known(sentence: str, lists: Container[str]) -> list[re.Match[str]]:
    """Return the words that are listed; of names such as Labor Day nothing else is said."""
    words = (word for word in WORD.finditer(sentence) if word[0].lower() in lists)
    return [word for word in words if word[0].islower() or not word.start()]


def morphology(sentence: str, draw: random.Random) -> Change | None:
    """Change the number of one noun, or the tense of one verb, where no other word depends on it.

    Nouns are those after a preposition and an article or possessive; verbs are those right after a
    pronoun, and "say" after a noun.
    """
    numbers, plain, third, said = _patterns()
    found = [(word, _nouns()[word["form"]]) for word in numbers.finditer(sentence)]
    if not DATED.search(sentence):
        for pattern, place in ((plain, 0), (third, 1), (said, 0)):
            found += [
                (word, _tenses(place)[word["form"]])
                for word in pattern.finditer(sentence)
                if not word["before"] or not HELPS.fullmatch(word["before"])
            ]
    if not found:
        return None
    word, other = draw.choice(found)
    start, end = word.span("form")
    return Change(sentence[:start] + other + sentence[end:], min(word["form"], other))


@cache
def _nouns() -> dict[str, str]:
    plurals = words().plurals
    return plurals | {many: one for one, many in plurals.items()}


@cache
def _tenses(place: int) -> dict[str, str]:
    """Return past forms by present ones and the reverse: plain ones (0) or third persons (1)."""
    present = {row[place]: row[2] for row in words().verbs}
    return present | {past: form for form, past in present.items() if past not in present}


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    number = rf"\b(?:{PREPOSITIONS}) (?:{THE}) (?P<form>{any_of(list(_nouns()))}){ENDS}"
    before = r"(?P<before>\b[\w']+ )?"
    end = r"\b(?!['-]|,)"
    plain, third = (any_of(list(_tenses(place))) for place in (0, 1))
    many = any_of(list(words().plurals.values()))
    return (
        re.compile(number),
        re.compile(rf"{before}\b(?i:I|you|we|they) (?P<form>{plain}){end}"),
        re.compile(rf"{before}\b(?i:he|she|it) (?P<form>{third}){end}"),
        re.compile(rf"{before}\b(?:{many}) (?P<form>say|said){end}"),
    )
