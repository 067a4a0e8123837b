"""Names without a language model, from the words that distinguish the positions of a cell.

Positions of every cell are sampled and the corpus is read around them. A name has the words that
are read last at these positions, and those that come next,

    read last → comes next

ranked by p(w | cell) ln(p(w | cell) / p(w)), one term of a Kullback–Leibler divergence. Where the
words read last vary, words of the surrounding text take their place, in brackets, ranked in the
same way; they come last if both sides have only grammar and punctuation. Where most positions are
inside a word, the whole word is shown, split at the prototype's position: Li-ouville, Ha-usdorff.
With fewer than ten positions, the next words are chance, and the tokens that the prototype raises
take their place; where the next words vary, these tokens follow them. Category and role follow from
the kinds of words in the cell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from prismlm.corpus.pieces import BROKEN, decode_token, pieces_of, token_alone
from prismlm.corpus.store import Corpus
from prismlm.files import read_json
from prismlm.lens.cells import Cells, group_members
from prismlm.lens.lens import Lens
from prismlm.lens.signatures import MOST_WORDS, different_words, shown_word
from prismlm.progress import SILENT, Reporter

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
# The least share of the positions for a word to be shown, and for a side to name a cell.
MIN_SHARE, MIN_SIDE = 0.05, 0.15
NAME_LENGTH = 48
TOPIC_WORDS = 5
TAG_LIFT, TAG_SHARE = 2.0, 0.3
# With fewer positions, the tokens a prototype raises say more than the words that come next.
FEW_NEXT = 10
# Occurrences that decide how a word is spelled out.
SPELLINGS = 8
CONTENT = re.compile(r"[^\W\d_]{3,}")

# The words of one side of a cell as they are shown, each with its share of the positions.
Side = dict[str, float]


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

    def joined(self, position: Any) -> Any:
        """Return whether the token at each position and the next one are parts of one word."""
        left, right = self.tokens[position], self.tokens[(position + 1) % len(self.tokens)]
        return self.open[left] & self.inner[right]

    def beginning(self, position: int) -> str:
        """Return a word up to and including the token at a position."""
        if character := self._character(position):
            return character
        first = position
        while position - first < MAX_PIECES and first > 0 and self.joined(first - 1):
            first -= 1
        return self._join(first, position)

    def end(self, position: int) -> str:
        """Return a word from the token at a position on; "-" where it started before."""
        if character := self._character(position):
            return character
        last = position
        while last - position < MAX_PIECES and self.joined(last):
            last += 1
        # Some tokenizers write the space before a number separately.
        if last == position and self.texts[self.tokens[position]] == " ":
            last = min(position + 1, len(self.tokens) - 1)
        return "-" * int(self.joined(position - 1)) + self._join(position, last)

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


def marked(text: Text, places: Places, row: int, before: int, after: int) -> tuple[str, str]:
    """Return the text around a place, with ``<<`` the token read last ``>>``, and the next token.

    There are so many tokens on each side; other ``<<`` and ``>>`` are replaced.
    """
    window = text.window(places.of(slice(row, row + 1)), before, after)[0]
    left, token, following, right = (
        text.spelled(part[part >= 0].tolist()).replace("<<", "‹‹").replace(">>", "››")
        for part in np.split(window, (before - 1, before, before + 1))
    )
    return f"{left}<<{token}>>{following}{right}", following


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


def kind_rates(text: Text, places: Places) -> dict[str, np.ndarray]:
    """Return, by kind, the share of each cell's positions whose tokens are of that kind, [K]."""
    current, following, among = text.read(places), text.next(places), text.among
    function = among(FUNCTION)
    scaffold = function | text.sign
    links = np.append(among(CLASSES["links"]), False)  # the last is for −1, outside the document
    continues, sign = text.joined(places.position), text.sign[following]
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
    count = partial(np.bincount, places.cell, minlength=len(places.size))
    size = np.maximum(count(), 1)
    return {name: count(flag) / size for name, flag in flags.items()}


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


@dataclass(frozen=True)
class Label:
    """The name of a prototype."""

    name: str
    description: str
    category: str  # one of CATEGORIES
    role: str  # the kind of word that comes next
    tags: tuple[str, ...]  # overrepresented domains
    topic: tuple[str, ...] = ()  # words of the surrounding text


class Namer:
    """Names cells from the rates of words, kinds, subjects and domains in each."""

    def __init__(self, text: Text, places: Places, lens: Lens, weight: Tensor) -> None:
        self.text, self.places, cells = text, places, lens.cells
        self.raised: list[list[str]] = lens.prototypes["top_tokens"].to_pylist()
        self.first = np.searchsorted(places.cell, np.arange(len(places.size) + 1))
        self.count = np.diff(self.first)
        self.tokens = {"read": text.read(places), "next": text.next(places)}
        shape = len(places.size), len(text.words)
        counts = {
            side: count_words(places.cell, text.word[tokens], shape)
            for side, tokens in self.tokens.items()
        }
        counts["about"] = count_content_words(text, places, shape)
        self.sides: dict[str, tuple[sparse.csr_matrix, sparse.csr_matrix]] = {}
        for side, count in counts.items():
            score = distinctiveness(count, self.count)
            # Words that occur once in a cell of many are chance.
            score.data[(count.data < 2) & np.repeat(self.count >= FEW, np.diff(count.indptr))] = 0
            self.sides[side] = score, shares(count, self.count)
        self.kinds = kind_rates(text, places)
        # How many times as many words of each subject are near as elsewhere, [K, subjects]. One
        # position's worth of the mean is added, which bounds the ratios of small cells.
        hits = sparse.csr_array(counts["about"] @ subject_words(weight, text)).toarray()
        base = hits.sum(0) / max(1, self.count.sum())
        self.subjects = (hits + base) / (np.maximum(base, 1e-9) * (self.count + 1)[:, None])
        self.domains, codes = cells.keys("domain")
        self.domain = np.zeros((len(places.size), len(self.domains)))
        np.add.at(self.domain, (places.cell, codes[places.document]), 1.0)
        self.domain /= np.maximum(self.count, 1)[:, None]
        self.base = np.maximum(cells.base_rates("domain"), 1e-9)

    def labels(self, progress: Reporter = SILENT) -> list[Label | None]:
        """Name every cell; None for an empty one."""
        labels: list[Label | None] = []
        with progress.task("Naming prototypes", len(self.count), "prototypes") as task:
            for cell, count in enumerate(self.count):
                labels.append(self._label(cell) if count else None)
                task.advance()
        return labels

    def _label(self, cell: int) -> Label:
        read, following, text = self._side("read", cell), self._side("next", cell), self.text
        places, count = self.places.of(slice(*self.first[cell : cell + 2])), self.count[cell]
        topic, rates = self._topic(cell, places), {n: float(r[cell]) for n, r in self.kinds.items()}
        # Overrepresented domains, with share and lift.
        share, lift = self.domain[cell], self.domain[cell] / self.base
        enough = np.flatnonzero((lift >= TAG_LIFT) & (share >= TAG_SHARE) & (count >= FEW))
        tags = {self.domains[i]: i for i in enough[np.argsort(-share[enough], kind="stable")][:2]}
        pieces: list[tuple[str, str]] = []
        if rates["piece"] >= 0.5:  # the most frequent words that continue, split where they do
            inside = places.position[text.joined(places.position)].tolist()
            pairs = ((text.beginning(i).strip(), text.end(i + 1).lstrip("-")) for i in inside)
            pieces = [pair for pair, _ in Counter(pairs).most_common(MOST_WORDS)]
        shown, raised = self._right_side(cell, following, inside_word=bool(pieces))
        about, name = (topic or list(tags))[:2], ""
        for most in range(MOST_WORDS, 0, -1):
            if pieces:
                whole = ", ".join("-".join(pair) for pair in pieces[:most])
                name = " → ".join(filter(None, (whole, ", ".join(raised[:most]))))
            else:
                name = _two_sides(read, shown[:most], about[:most], most)
            if len(name) <= NAME_LENGTH:
                break
        else:
            name = name[: NAME_LENGTH - 1] + "…"
        parts = [f"Read last: {_listed(read)}. Comes next: {_listed(following)}."]
        parts += [f"It raises {', '.join(raised)}."] if raised else []
        parts += [f"The text around has {', '.join(topic)}."] if topic else []
        parts += [f"{share[i]:.0%} {t}, {lift[i]:.1f} times its share." for t, i in tags.items()]
        size = int(self.places.size[cell])
        parts.append(f"{size:,} {'place' if size == 1 else 'places'}.")
        return Label(
            name,
            " ".join(parts),
            category(rates, self.subjects[cell], count),
            role(rates),
            tuple(tags),
            topic=tuple(dict.fromkeys([*("".join(pair).lower() for pair in pieces), *topic])),
        )

    def _right_side(
        self, cell: int, following: Side, *, inside_word: bool
    ) -> tuple[list[str], list[str]]:
        """Return the words right of the arrow, and those among them that the prototype raises."""
        words = list(following)
        if self.count[cell] < FEW_NEXT:
            words = []
        elif not inside_word and sum(following.values()) < MIN_SIDE:
            words = words[: MOST_WORDS - 1]
        else:
            return words, []
        seen = {word.lower() for word in words}
        raised = [word for word in different_words(self.raised[cell]) if word.lower() not in seen]
        raised = sorted(raised, key=_is_grammar)[: MOST_WORDS - len(words)]
        return [*words, *raised], raised

    def _side(self, side: str, cell: int) -> Side:
        """Return the words of one side as they are shown, each as it is most often spelled."""
        words: dict[str, tuple[str, float]] = {}
        rows = np.arange(self.first[cell], self.first[cell + 1])
        spell = self.text.beginning if side == "read" else self.text.end
        for word, share in self._top_words(side, cell, 2 * MOST_WORDS):
            if (share < MIN_SHARE and words) or len(words) == MOST_WORDS:
                break
            of_word = rows[self.text.word[self.tokens[side][rows]] == word][:SPELLINGS]
            positions = self.places.position[of_word] + (side == "next")
            spelled = shown_word(mode(map(spell, positions.tolist())))
            words.setdefault(spelled.lower(), (spelled, share))
        # Content words before more frequent punctuation.
        return dict(sorted(words.values(), key=lambda pair: _is_grammar(pair[0])))

    def _top_words(self, side: str, cell: int, most: int) -> list[tuple[int, float]]:
        """Return the words of one side with the largest scores, and their shares."""
        score, share = self.sides[side]
        row = slice(score.indptr[cell], score.indptr[cell + 1])
        scores: np.ndarray = score.data[row]
        order = np.argsort(-scores, kind="stable")[:most]
        order = order[scores[order] > 0] + row.start
        return list(zip(score.indices[order].tolist(), share.data[order].tolist(), strict=True))

    def _topic(self, cell: int, places: Places) -> list[str]:
        """Return the top words of the surrounding text, whole."""
        near, topic = words_near(self.text, places), dict[str, None]()
        for word, _ in self._top_words("about", cell, TOPIC_WORDS):
            row, column = (index[:SPELLINGS] for index in np.nonzero(near == word))
            starts = places.position[row] + 1 - BEFORE + column
            ends = (self.text.end(position).strip().lower() for position in starts.tolist())
            topic[mode(ends)] = None
        return list(topic)


def shares(count: sparse.csr_matrix, positions: np.ndarray) -> sparse.csr_matrix:
    """Return the share p of each cell's positions that have each word."""
    share = count.copy()
    share.data /= np.repeat(np.maximum(positions, 1), np.diff(count.indptr)).astype(np.float32)
    return share


def distinctiveness(count: sparse.csr_matrix, positions: np.ndarray) -> sparse.csr_matrix:
    """Return p ln(p / base) of each word in each cell."""
    base = np.asarray(count.sum(0)).ravel() / max(1, positions.sum())
    score = shares(count, positions)
    score.data *= np.log(score.data / base[score.indices]).astype(np.float32)
    return score


def _two_sides(read: Side, following: list[str], about: list[str], most: int) -> str:
    """Return a name of two sides, with the topic where these alone say little."""
    topic = f"({', '.join(about)})" if about else "…"
    left = ", ".join(list(read)[:most]) if sum(read.values()) >= MIN_SIDE else topic
    right = ", ".join(following) or "…"
    name = f"{left} → {right}"
    enough = right != "…" and not _is_grammar(name)
    return name if enough or topic in ("…", left) else f"{name} {topic}"


def _is_grammar(name: str) -> bool:
    """Whether a name has no content word and no piece of one."""
    return all(word.lower() in FUNCTION for word in CONTENT.findall(name))


def _listed(side: Side) -> str:
    return ", ".join(f"{word} {share:.0%}" for word, share in side.items()) or "many things"
