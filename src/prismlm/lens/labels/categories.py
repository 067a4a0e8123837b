"""Kinds of tokens, and the category and role of a prototype by the kinds that occur in its cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.pieces import decode_token
from prismlm.files import read_json

if TYPE_CHECKING:
    from prismlm.lens.labels.places import Places, Text

# English closed-class words, words of numbers and time, and seed words of subjects.
WORDS: dict[str, Any] = read_json(Path(__file__).parent / "words.json")
CLASSES = {name: frozenset(words.split()) for name, words in WORDS.items() if name != "subjects"}
# Any word outside the closed classes counts as a content word.
FUNCTION = frozenset().union(
    *map(
        CLASSES.__getitem__,
        ("determiners", "prepositions", "pronouns", "conjunctions", "auxiliaries", "adverbs"),
    )
)
# Tokens before a position that are searched for parts of a link.
LINK_TOKENS = 10
SENTENCE_SIGNS = frozenset(".,;:!?'\"’”“‘()-–—")
SENTENCE_ENDS = frozenset([".", "!", "?", '."', '?"', '!"', ".”", ":"])

# The fourteen categories of PRISM.
BOILERPLATE, MORPHOLOGY, SCAFFOLD = "Boilerplate / Artifact", "Morphology", "Grammar / Scaffold"
NUMBERS, ENTITIES, LINKS = "Numbers / Time", "Named Entities", "URLs / IDs"
OTHER = "Misc / Other"
SUBJECTS: dict[str, str] = WORDS["subjects"]
CATEGORIES = (
    BOILERPLATE, MORPHOLOGY, SCAFFOLD, NUMBERS, ENTITIES, LINKS, OTHER, *SUBJECTS
)  # fmt: skip
# A word belongs to a subject if it is among this share of words nearest to it.
NEAREST = 0.015
MIN_SEED_WORDS = 3
# Directions common to frequent words, which carry no meaning (Mu and Viswanath 2018).
DIRECTIONS = 8
# A cell is of a subject whose words are this many times as frequent in its text as elsewhere.
SUBJECT_LIFT = 3.0
# Cells with fewer positions are too small for statistics of words.
FEW = 5


class Vocabulary:
    """The tokens of a tokenizer as text, and their kinds as bool [V].

    Attributes:
        texts: the text of each token, with its leading space, [V].
        words: the distinct words and pieces of words, in lower case without spaces.
        word: the number of each token's word, int64 [V].
        goes_on, open: starts with a letter without a space; ends in a letter, so that the word
            may continue.
        digit, line, capital: starts with a digit; has a line break; a space and a capital.
        sign, markup: no letters or digits; among those, other than punctuation.
        content: starts a word that says what a text is about.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        known = range(min(size, len(tokenizer)))
        self.texts = [decode_token(tokenizer, token) for token in known]
        self.texts += [""] * (size - len(self.texts))
        numbers: dict[str, int] = {}
        keys = [text.strip().lower() or text for text in self.texts]
        self.word = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        self.words = list(numbers)

        def where(predicate: Callable[[str], object]) -> np.ndarray:
            return np.array([bool(predicate(text)) for text in self.texts])

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


def kind_rates(text: Text, places: Places, num_cells: int) -> dict[str, np.ndarray]:
    """Return, by kind, the share of each cell's positions whose tokens are of that kind, [K]."""
    vocabulary, among = text.vocabulary, text.vocabulary.among
    current, following = text.read(places), text.next(places)
    function = among(FUNCTION)
    scaffold = function | vocabulary.sign
    links = np.append(among(CLASSES["links"]), False)  # the last is for −1, outside the document
    goes_on, sign = text.goes_on(places), vocabulary.sign[following]
    plain = ~goes_on & ~sign & ~function[following] & ~vocabulary.digit[following]
    noun_before = among(CLASSES["determiners"] | CLASSES["prepositions"])[current]
    verb_before = among(CLASSES["pronouns"] | CLASSES["auxiliaries"] | {"to"})[current]
    starts_sentence = (vocabulary.line | among(SENTENCE_ENDS))[current]
    flags = {
        "piece": goes_on,
        "line": vocabulary.line[following],
        "markup": vocabulary.markup[following] | vocabulary.markup[current],
        "digit": vocabulary.digit[following] | among(CLASSES["numbers"])[following],
        "read digit": vocabulary.digit[current],
        "time": among(CLASSES["time"])[following],
        "link": links[text.window(places, LINK_TOKENS, 0)].any(1),
        "capital": vocabulary.capital[following] & ~starts_sentence,
        "sign": sign,
        "function": function[following],
        "scaffold": scaffold[following] & scaffold[current],
        "grammar": function[following] | sign | (function[current] & plain),
        "noun": plain & noun_before,
        "verb": plain & verb_before,
        "word": plain,
    }
    size = np.maximum(np.bincount(places.cell, minlength=num_cells), 1)
    return {
        name: np.bincount(places.cell, flag, minlength=num_cells) / size
        for name, flag in flags.items()
    }


def role(rates: Mapping[str, float]) -> str:
    """Return the kind of word that follows most positions of a cell."""
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


def category(rates: Mapping[str, float], subjects: np.ndarray, positions: int) -> str:
    """Return the first category whose rule holds, for a cell of so many positions.

    ``subjects`` says how many times as many words of each subject it has as other cells.
    """
    best = int(np.argmax(subjects))
    numbers = max(rates["digit"], rates["time"], rates["read digit"])
    rules = (
        (rates["link"] >= 0.5, LINKS),
        (max(rates["line"], rates["markup"]) >= 0.5, BOILERPLATE),
        (rates["piece"] >= 0.5, MORPHOLOGY),
        (rates["scaffold"] >= 0.5, SCAFFOLD),
        (numbers >= 0.5, NUMBERS),
        (rates["capital"] >= 0.4, ENTITIES),
        (positions >= FEW and subjects[best] >= SUBJECT_LIFT, list(SUBJECTS)[best]),
        (rates["grammar"] >= 0.5, SCAFFOLD),
    )
    return next((name for holds, name in rules if holds), OTHER)


@torch.no_grad()
def subject_words(weight: Tensor, vocabulary: Vocabulary) -> sparse.csr_matrix:
    """Return which words belong to which subject, 1 or 0, [words, subjects].

    The center of a subject is the mean of the unit rows of W of its seed words, after removing the
    mean of all rows and their first principal directions. Each word belongs to the subject it is
    nearest to, if to any.
    """
    content = np.flatnonzero(vocabulary.content)
    shape = len(vocabulary.words), len(SUBJECTS)
    if len(content) <= MIN_SEED_WORDS:
        return sparse.csr_matrix(shape, dtype=np.float32)
    rows = weight[torch.from_numpy(content)].float()
    rows -= rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    common = vectors[:, -min(DIRECTIONS, rows.shape[1] - 1) :]
    rows = torch.nn.functional.normalize(rows - rows @ common @ common.T, dim=1)
    number = {vocabulary.words[w]: i for i, w in enumerate(vocabulary.word[content].tolist())}
    seeds = [
        [number[word] for word in words.split() if word in number] for words in SUBJECTS.values()
    ]
    zero = torch.zeros(rows.shape[1])
    centers = [rows[seed].mean(0) if len(seed) >= MIN_SEED_WORDS else zero for seed in seeds]
    cosines = rows @ torch.nn.functional.normalize(torch.stack(centers), dim=1).T
    threshold = cosines.quantile(1 - NEAREST, dim=0).clamp(min=1e-6)
    nearest = cosines.div(threshold).max(1)
    for subject, seed in enumerate(seeds):
        nearest.values[seed], nearest.indices[seed] = 1.0, subject
    chosen = (nearest.values >= 1).numpy()
    entries = (vocabulary.word[content][chosen], nearest.indices.numpy()[chosen])
    matrix = sparse.csr_matrix((np.ones(int(chosen.sum()), np.float32), entries), shape=shape)
    matrix.data[:] = 1  # several tokens write one word
    return matrix
