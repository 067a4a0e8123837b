"""What kind of thing each token is, and which kinds are read, and come next, at places of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.pieces import decode_token
from prismlm.files import read_json

if TYPE_CHECKING:
    from prismlm.lens.labels.places import Places, Text

# The closed classes of English, words of numbers and time, and words that are of a subject.
WORDS: dict[str, Any] = read_json(Path(__file__).parent / "words.json")
DETERMINERS, PREPOSITIONS, PRONOUNS, CONJUNCTIONS, AUXILIARIES, ADVERBS, NUMBERS, TIME, LINKS = (
    frozenset(WORDS[name].split())
    for name in (
        "determiners", "prepositions", "pronouns", "conjunctions", "auxiliaries", "adverbs",
        "numbers", "time", "links",
    )
)  # fmt: skip
# What is in none of them is taken for a word with content.
FUNCTION = DETERMINERS | PREPOSITIONS | PRONOUNS | CONJUNCTIONS | AUXILIARIES | ADVERBS
LINK_TOKENS = 10
SENTENCE_SIGNS = frozenset(".,;:!?'\"’”“‘()-–—")


class Vocabulary:
    """The tokens of a tokenizer as text, by kind, bool [V].

    Attributes:
        texts: what each token writes, with the space before it, [V].
        words: the distinct words and pieces of words, in lower case and without spaces.
        word: the number of the word of each token, int64 [V].
        goes_on, open: begin with a letter and no space; end with one, so that a word may go on.
        digit, line, capital: write digits, end a line, begin with a space and a capital.
        sign, markup: no letters or digits; signs that are not those of a sentence.
        content: begin a word that says what a text is about.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        known = range(min(size, len(tokenizer)))
        self.texts = [decode_token(tokenizer, token) for token in known]
        self.texts += [""] * (size - len(self.texts))
        numbers: dict[str, int] = {}
        keys = [text.strip().lower() or text for text in self.texts]
        self.word = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        self.words = list(numbers)

        def where(holds: Callable[[str], object]) -> np.ndarray:
            return np.array([bool(holds(text)) for text in self.texts])

        self.goes_on = where(lambda t: t[:1].isalpha())
        self.open = where(lambda t: t[-1:].isalpha())
        self.digit = where(lambda t: t.strip()[:1].isdigit())
        self.line = where(lambda t: "\n" in t)
        self.sign = where(lambda t: t.strip() and not any(map(str.isalnum, t))) & ~self.line
        self.markup = self.sign & where(lambda t: not SENTENCE_SIGNS.issuperset(t.strip()))
        self.capital = where(lambda t: t[:1] == " " and t[1:2].isupper() and t != " I")
        long = where(lambda t: t[:1].isspace() and len(t.strip()) > 2 and t.strip().isalpha())
        self.content = long & ~self.among(FUNCTION)

    def among(self, words: frozenset[str]) -> np.ndarray:
        """Return which tokens write one of some words, bool [V]."""
        return np.array([word in words for word in self.words])[self.word]


def kind_rates(
    text: Text, places: Places, read: np.ndarray, following: np.ndarray, num_cells: int
) -> dict[str, np.ndarray]:
    """Return, by kind, the share of each cell's places where that is read or comes next, [K]."""
    kinds = text.vocabulary
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
