"""Sampled positions of every cell, the corpus text around them, and what kinds of words it has.

The category and role of a prototype follow from the kinds that occur in its cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from prismlm.corpus.pieces import BROKEN, decode_token, pieces_of, token_alone
from prismlm.corpus.store import Corpus
from prismlm.files import read_json
from prismlm.lens.cells import Cells, group_members

ROWS_AT_ONCE = 2**16
# The surrounding text of a position: tokens up to the one read last, and after it.
BEFORE, AFTER = 24, 8
MAX_PIECES = 6
# UTF-8 bytes of a character, and so the most tokens it can be split into.
MOST_BYTES = 4

# English closed-class words, words of numbers and time, and seed words of subjects.
WORDS: dict[str, Any] = read_json(Path(__file__).parent / "words.json")
CLASSES = {name: frozenset(words.split()) for name, words in WORDS.items() if name != "subjects"}
# Any word outside these classes counts as a content word.
GRAMMAR = ("determiners", "prepositions", "pronouns", "conjunctions", "auxiliaries", "adverbs")
FUNCTION = frozenset[str]().union(*(CLASSES[name] for name in GRAMMAR))
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
# The role of a cell by the kind of most of its next tokens.
ROLES = {
    "piece": "rest of a word", "line": "end of a line", "digit": "number", "sign": "punctuation",
    "function": "function word", "capital": "name", "noun": "noun-like", "verb": "verb-like",
    "word": "word",
}  # fmt: skip
# A word belongs to a subject if it is among this share of words nearest to it.
NEAREST = 0.015
MIN_SEED_WORDS = 3
# Directions common to frequent words, which carry no meaning (Mu and Viswanath 2018).
DIRECTIONS = 8
# A cell is of a subject whose words are this many times as frequent in its text as elsewhere.
SUBJECT_LIFT = 3.0
# Cells with fewer positions are too small for statistics of words.
FEW = 5


class Places(NamedTuple):
    """Sampled positions in the order of cells, int64 [n] each."""

    cell: np.ndarray
    position: np.ndarray  # global, of the token read last
    document: np.ndarray  # the row in the cells' documents
    size: np.ndarray  # of each cell, without sampling, [K]

    def of(self, rows: np.ndarray | slice) -> Places:
        """Return a subset, by mask, indices or slice."""
        return Places(self.cell[rows], self.position[rows], self.document[rows], self.size)


def sample_places(cells: Cells, num_cells: int, most: int) -> Places:
    """Return at most ``most`` positions of every cell, the same every time.

    The rows of a cell are sorted by next token, so that equal steps through them take each next
    token in proportion.
    """
    size = cells.sizes(num_cells)
    count = np.minimum(size, most)
    cell, number = group_members(count)
    rows = (np.cumsum(size) - size)[cell] + (2 * number + 1) * size[cell] // (2 * count[cell])
    parts = [
        cells.records(rows[start : start + ROWS_AT_ONCE])["position"]
        for start in range(0, len(rows), ROWS_AT_ONCE)
    ]
    position = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
    return Places(cell, position, cells.document_of(position), size)


class Text:
    """A corpus as tokens and words, to be read around places; kinds of tokens are bool [V].

    Attributes:
        tokens: all tokens of the corpus, [N].
        texts: the text of each token of the vocabulary, with its leading space, [V].
        words: the distinct words and pieces of words, in lower case without spaces.
        word: the number of each token's word, int64 [V].
        inner, open: starts with a letter without a space; ends in a letter, so that the word may
            continue.
        digit, line, capital: starts with a digit; has a line break; a space and a capital.
        sign, markup: no letters or digits; among those, other than punctuation.
        content: starts a word that says what a text is about.
    """

    def __init__(self, corpus: Corpus, size: int) -> None:
        self.corpus, self.tokens = corpus, corpus.tokens(0, corpus.num_tokens)
        ids = range(min(size, len(corpus.tokenizer)))
        self.texts = [decode_token(corpus.tokenizer, token) for token in ids]
        self.texts += [""] * (size - len(self.texts))
        numbers: dict[str, int] = {}
        keys = [text.strip().lower() or text for text in self.texts]
        self.word = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        self.words = list(numbers)

        def where(predicate: Callable[[str], object]) -> np.ndarray:
            return np.array([bool(predicate(text)) for text in self.texts])

        self.inner = where(lambda t: t[:1].isalpha())
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

    def read(self, places: Places) -> np.ndarray:
        """Return the token read last at each place, int64 [n]."""
        return self.tokens[places.position].astype(np.int64)

    def next(self, places: Places) -> np.ndarray:
        """Return the token that comes next, int64 [n]."""
        return self.tokens[places.position + 1].astype(np.int64)

    def continues(self, places: Places) -> np.ndarray:
        """Return where the next token continues the word of the one read last, bool [n]."""
        return self._joined(places.position)

    def window(self, places: Places, before: int, after: int) -> np.ndarray:
        """Return ``before`` tokens up to the one read last and ``after`` after it.

        Tokens outside the document, and the tokenizer's prefix, are −1: int64 [n, before + after].
        """
        positions = places.position[:, None] + np.arange(1 - before, after + 1)
        starts = self.corpus.starts
        number = np.searchsorted(starts, places.position, side="right") - 1
        first = starts[number][:, None]
        last = first + self.corpus.lengths[number][:, None]
        inside = (positions >= first + len(self.corpus.prefix)) & (positions < last)
        tokens = self.tokens[np.where(inside, positions, 0)].astype(np.int64)
        return np.where(inside, tokens, -1)

    def beginning(self, position: int) -> str:
        """Return a word up to and including the token at a position."""
        if character := self._character(position):
            return character
        first = position
        while position - first < MAX_PIECES and first > 0 and self._joined(first - 1):
            first -= 1
        return self._join(first, position)

    def end(self, position: int) -> str:
        """Return a word from the token at a position on; "-" where it started before."""
        if character := self._character(position):
            return character
        last = position
        while last - position < MAX_PIECES and self._joined(last):
            last += 1
        # Some tokenizers write the space before a number separately.
        if last == position and self.texts[self.tokens[position]] == " ":
            last = min(position + 1, len(self.tokens) - 1)
        return "-" * int(self._joined(position - 1)) + self._join(position, last)

    def spelled(self, tokens: list[int]) -> str:
        """Decode consecutive tokens, with the space before the first."""
        return decode_token(self.corpus.tokenizer, *tokens) if tokens else ""

    def _join(self, first: int, last: int) -> str:
        return "".join(self.texts[token] for token in self.tokens[first : last + 1].tolist())

    def _character(self, position: int) -> str | None:
        """Return the character that a token has some bytes of, and which: ``’ 1/2``."""
        if BROKEN not in self.texts[self.tokens[position]]:
            return None
        first, tokenizer = max(0, position - MOST_BYTES), self.corpus.tokenizer
        ids = self.tokens[first : position + MOST_BYTES].tolist()
        label = pieces_of(tokenizer, ids)[position - first].label
        return token_alone(tokenizer, ids[position - first]) if BROKEN in label else label

    def _joined(self, position: Any) -> Any:
        """Whether the token at each position and the next one are parts of one word."""
        left, right = self.tokens[position], self.tokens[(position + 1) % len(self.tokens)]
        return self.open[left] & self.inner[right]


class Marked(NamedTuple):
    """The text around a place, with the token read last as ``<<token>>``, and the next token."""

    text: str
    next: str


def marked(text: Text, places: Places, row: int, before: int, after: int) -> Marked:
    """Return a place with so many tokens on each side; other ``<<`` and ``>>`` are replaced."""
    window = text.window(places.of(slice(row, row + 1)), before, after)[0]
    left, token, following, right = (
        text.spelled(part[part >= 0].tolist()).replace("<<", "‹‹").replace(">>", "››")
        for part in np.split(window, (before - 1, before, before + 1))
    )
    return Marked(f"{left}<<{token}>>{following}{right}", following)


def count_words(cell: np.ndarray, word: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Return how often each word occurs at the places of each cell, [K, words]."""
    return sparse.csr_matrix((np.ones(len(cell), np.float32), (cell, word)), shape=shape)


def count_content_words(text: Text, places: Places, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Return at how many places of each cell each content word is near, [K, words]."""
    total = sparse.csr_matrix(shape, dtype=np.float32)
    for start in range(0, len(places.cell), ROWS_AT_ONCE):
        part = places.of(slice(start, start + ROWS_AT_ONCE))
        near = words_near(text, part)
        place, _ = np.nonzero(near >= 0)
        # A word counts once per place.
        place, word = np.divmod(np.unique(place * shape[1] + near[near >= 0]), shape[1])
        total += count_words(part.cell[place], word, shape)
    return total


def words_near(text: Text, places: Places) -> np.ndarray:
    """Return the content word that each token near places starts, or −1, [n, tokens]."""
    window = text.window(places, BEFORE, AFTER)
    return np.where((window >= 0) & text.content[window], text.word[window], -1)


def most_common(words: Iterable[str]) -> str:
    """Return the most frequent word, the first of equals."""
    return Counter(words).most_common(1)[0][0]


def kind_rates(text: Text, places: Places, num_cells: int) -> dict[str, np.ndarray]:
    """Return, by kind, the share of each cell's positions whose tokens are of that kind, [K]."""
    current, following, among = text.read(places), text.next(places), text.among
    function = among(FUNCTION)
    scaffold = function | text.sign
    links = np.append(among(CLASSES["links"]), False)  # the last is for −1, outside the document
    continues, sign = text.continues(places), text.sign[following]
    plain = ~continues & ~sign & ~function[following] & ~text.digit[following]
    noun_before = among(CLASSES["determiners"] | CLASSES["prepositions"])[current]
    verb_before = among(CLASSES["pronouns"] | CLASSES["auxiliaries"] | {"to"})[current]
    starts_sentence = (text.line | among(SENTENCE_ENDS))[current]
    flags = {
        "piece": continues,
        "line": text.line[following],
        "markup": text.markup[following] | text.markup[current],
        "digit": text.digit[following] | among(CLASSES["numbers"])[following],
        "read digit": text.digit[current],
        "time": among(CLASSES["time"])[following],
        "link": links[text.window(places, LINK_TOKENS, 0)].any(1),
        "capital": text.capital[following] & ~starts_sentence,
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
    best = max(ROLES, key=lambda name: rates[name])
    return ROLES[best] if rates[best] >= 0.4 else "mixed"


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
    return next((name for applies, name in rules if applies), OTHER)


@torch.no_grad()
def subject_words(weight: Tensor, text: Text) -> sparse.csr_matrix:
    """Return which words belong to which subject, 1 or 0, [words, subjects].

    The center of a subject is the mean of the unit rows of W of its seed words, after removing the
    mean of all rows and their first principal directions. Each word belongs to the subject it is
    nearest to, if to any.
    """
    content = np.flatnonzero(text.content)
    shape = len(text.words), len(SUBJECTS)
    if len(content) <= MIN_SEED_WORDS:
        return sparse.csr_matrix(shape, dtype=np.float32)
    rows = weight[torch.from_numpy(content)].float()
    rows -= rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    common = vectors[:, -min(DIRECTIONS, rows.shape[1] - 1) :]
    rows = torch.nn.functional.normalize(rows - rows @ common @ common.T, dim=1)
    number = {text.words[w]: i for i, w in enumerate(text.word[content].tolist())}
    seeds = [[number[w] for w in words.split() if w in number] for words in SUBJECTS.values()]
    zero = torch.zeros(rows.shape[1])
    centers = [rows[seed].mean(0) if len(seed) >= MIN_SEED_WORDS else zero for seed in seeds]
    cosines = rows @ torch.nn.functional.normalize(torch.stack(centers), dim=1).T
    threshold = cosines.quantile(1 - NEAREST, dim=0).clamp(min=1e-6)
    nearest = cosines.div(threshold).max(1)
    for subject, seed in enumerate(seeds):
        nearest.values[seed], nearest.indices[seed] = 1.0, subject
    near = (nearest.values >= 1).numpy()
    entries = text.word[content][near], nearest.indices.numpy()[near]
    matrix = count_words(*entries, shape)
    matrix.data[:] = 1  # several tokens write one word
    return matrix
