"""Which kinds of words are read, and come next, at the places of each prototype."""

from __future__ import annotations

import numpy as np

from prismlm.labels.places import Places, Text
from prismlm.labels.vocabulary import (
    AUXILIARIES,
    DETERMINERS,
    FUNCTION,
    LINKS,
    NUMBERS,
    PREPOSITIONS,
    PRONOUNS,
    TIME,
    Vocabulary,
)

LINK_TOKENS = 10


def kind_rates(
    text: Text, places: Places, read: np.ndarray, following: np.ndarray, num_cells: int
) -> dict[str, np.ndarray]:
    """Return, by kind, the share of each cell's places where that is read or comes next, [K]."""
    kinds: Vocabulary = text.vocabulary
    goes_on = text.goes_on(places)
    function, links = kinds.among(FUNCTION), np.append(kinds.among(LINKS), False)
    sign = kinds.sign[following]
    noun_before = kinds.among(DETERMINERS | PREPOSITIONS)[read]
    verb_before = kinds.among(PRONOUNS | AUXILIARIES | {"to"})[read]
    plain = ~goes_on & ~sign & ~function[following] & ~kinds.digit[following]
    window = text.window(places, LINK_TOKENS, 0)
    held = {
        "piece": goes_on,
        "line": kinds.line[following],
        "markup": kinds.markup[following] | kinds.markup[read],
        "digit": kinds.digit[following] | kinds.among(NUMBERS)[following],
        "read digit": kinds.digit[read],
        "time": kinds.among(TIME)[following],
        "link": links[window].any(1),
        "capital": kinds.capital[following] & ~_ends(kinds)[read],
        "sign": sign,
        "function": function[following],
        "scaffold": (function | kinds.sign)[following] & (function | kinds.sign)[read],
        "grammar": function[following] | sign | (function[read] & plain),
        "noun": plain & noun_before,
        "verb": plain & verb_before,
        "word": plain,
    }
    size = np.maximum(np.bincount(places.cell, minlength=num_cells), 1)
    return {
        name: np.bincount(places.cell, flag, minlength=num_cells) / size
        for name, flag in held.items()
    }


def _ends(kinds: Vocabulary) -> np.ndarray:
    """Return the tokens after which a sentence begins, bool [V]."""
    return kinds.line | kinds.among(frozenset([".", "!", "?", '."', '?"', '!"', ".”", ":"]))


def role(rates: dict[str, float]) -> str:
    """Return what kind of word comes next at most places of a cell."""
    names = {
        "piece": "rest of a word",
        "line": "end of a line",
        "digit": "number",
        "sign": "punctuation",
        "function": "function word",
        "capital": "name",
        "noun": "noun-like",
        "verb": "verb-like",
        "word": "word",
    }
    best = max(names, key=lambda name: rates[name])
    return names[best] if rates[best] >= 0.4 else "mixed"
