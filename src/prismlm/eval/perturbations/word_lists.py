"""The word lists that sentences are perturbed by; ``words/ATTRIBUTION.md`` credits their sources.

``benchmarks/prototype_mixer/word_lists.py`` makes the file.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WORDS_FILE = Path(__file__).parent / "words" / "words.json.xz"


@dataclass(frozen=True)
class Words:
    """The lists.

    Attributes:
        spelling: American and British forms of words, either way.
        synonyms: words, in each of their forms, and what can stand for them.
        plurals: nouns that are counted, and their plurals.
        verbs: plain form, third person and past.
        contractions: short and long forms, such as don't and do not.
        abbreviations: long form, short form, and what stands beside it.
        gender: words of one gender and of the other.
        common: words that are not rare in text.
    """

    spelling: dict[str, str]
    synonyms: dict[str, list[str]]
    plurals: dict[str, str]
    verbs: list[list[str]]
    contractions: dict[str, str]
    abbreviations: list[list[str]]
    gender: dict[str, str]
    common: frozenset[str]


@cache
def words() -> Words:
    """Return the lists, which are read once."""
    found = json.loads(lzma.decompress(WORDS_FILE.read_bytes()))
    for name in ("spelling", "gender"):
        found[name] = dict(found[name]) | {other: one for one, other in found[name]}
    return Words(**found | {"common": frozenset(found["common"])})


@dataclass(frozen=True)
class Change:
    """A sentence that was changed.

    Attributes:
        text: the sentence afterwards.
        by: the word or rule that changed it, so that no word fills a slice; empty for any.
        spare: whether it is used only where others run out.
    """

    text: str
    by: str
    spare: bool = False


def cased(word: str, like: str) -> str:
    """Return a word that begins with a capital, or is all capitals, as another does."""
    if len(like) > 1 and like.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def any_of(expressions: Sequence[str]) -> str:
    """Return a pattern of whichever of some words fits, the longest first."""
    return "|".join(map(re.escape, sorted(expressions, key=lambda word: (-len(word), word))))


def replaced(sentence: str, found: re.Match[str], instead: str) -> str | None:
    """Return a sentence with a match replaced, or None where "a" and "an" would be wrong."""
    before = sentence[: found.start()].rsplit(" ", 2)[-2:]
    article = before[0].lower() if len(before) == 2 and not before[1] else ""
    vowels = tuple("aeiouAEIOU")
    if article in ("a", "an") and found[0].startswith(vowels) != instead.startswith(vowels):
        return None
    return sentence[: found.start()] + instead + sentence[found.end() :]
