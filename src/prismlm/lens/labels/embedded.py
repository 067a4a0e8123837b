"""Names without a model: what is read, what comes next, and what the text around is about.

A prototype is nearest to some positions of a corpus. Its name has the words that set these apart,

    read last → comes next

each by how much it distinguishes this cell from all places, p(w | cell) ln(p(w | cell) / p(w)), one
term of a Kullback–Leibler divergence. Where what was read varies, words of the text around stand
for it, in brackets, chosen by the same measure over the places that they are near; they come last
where both sides have only words of grammar and signs. Where mostly a word goes on, it is shown
whole, parted where the prototype is: Li-ouville, Ha-usdorff. Where a cell has less than ten places,
what came next there is chance, and the tokens that the prototype raises stand for it; where what
came next varies, they follow it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from prismlm.lens.cells import Cells
from prismlm.lens.labels import categories
from prismlm.lens.labels.places import (
    BEFORE,
    SOME,
    Places,
    Text,
    around,
    counts,
    most_common,
    words_near,
)
from prismlm.lens.labels.vocabulary import FUNCTION, kind_rates, role
from prismlm.lens.signatures import MOST_WORDS, different_words, shown_word
from prismlm.progress import SILENT, Reporter

# A word is shown, and a side of a name stands for a cell, from this share of the places on.
MIN_SHARE, MIN_SIDE = 0.05, 0.15
NAME_LENGTH = 48
TOPIC_WORDS = 5
TAG_LIFT, TAG_SHARE = 2.0, 0.3
# A cell with fewer places has words of its own by accident.
FEW = 5
# And what comes next in so few says less of what a prototype predicts than what it raises.
FEW_NEXT = 10
SUBJECT_LIFT = 3.0
# Letters enough to be a word or a piece of one that says something.
CONTENT = re.compile(r"[^\W\d_]{3,}")

# What each word of each cell weighs, of how often it is there and how many places each cell has.
Weigh = Callable[[sparse.csr_matrix, np.ndarray], sparse.csr_matrix]
# Words of one side of a cell as they are written, each with its share of the places.
Side = dict[str, float]


@dataclass(frozen=True)
class Label:
    """What a prototype is called.

    ``category`` is one of :data:`~prismlm.lens.labels.categories.CATEGORIES`, ``role`` the kind of
    word that comes next, ``tags`` are domains that its places are of more often than others,
    ``topic`` words of the text around.
    """

    name: str
    description: str
    category: str
    role: str
    tags: tuple[str, ...]
    topic: tuple[str, ...] = ()


def embedded_labels(
    text: Text,
    places: Places,
    cells: Cells,
    subject_words: sparse.csr_matrix,
    raised: Sequence[Sequence[str]],
    weigh: Weigh | None = None,
    progress: Reporter = SILENT,
) -> list[Label | None]:
    """Name every cell from its places; None for one without any."""
    statistics = _Statistics(text, places, cells, subject_words, raised, weigh or telling)
    labels: list[Label | None] = []
    with progress.task("Naming prototypes", len(places.size), "prototypes") as task:
        for cell in range(len(places.size)):
            labels.append(statistics.label(cell) if statistics.count[cell] else None)
            task.advance()
    return labels


class _Statistics:
    """Rates of words and kinds in every cell."""

    def __init__(
        self,
        text: Text,
        places: Places,
        cells: Cells,
        subject_words: sparse.csr_matrix,
        raised: Sequence[Sequence[str]],
        weigh: Weigh,
    ) -> None:
        self.text, self.places, self.raised = text, places, raised
        kinds, num_cells = text.vocabulary, len(places.size)
        self.first = np.searchsorted(places.cell, np.arange(num_cells + 1))
        self.count = np.diff(self.first)
        self.read, self.next = text.read(places), text.next(places)
        near = around(text, places, num_cells)
        tokens = {"read": self.read, "next": self.next}
        counted = {
            side: counts(places.cell, kinds.word[own], num_cells, len(kinds.words))
            for side, own in tokens.items()
        }
        self.sides = {
            side: _weighed(count, self.count, weigh)
            for side, count in (counted | {"about": near}).items()
        }
        self.kinds = kind_rates(text, places, self.read, self.next, num_cells)
        self.subjects = _subject_rates(near @ subject_words, self.count)
        self.domains, codes = cells.keys("domain")
        self.domain = np.zeros((num_cells, len(self.domains)))
        np.add.at(self.domain, (places.cell, codes[places.document]), 1.0)
        self.domain /= np.maximum(self.count, 1)[:, None]
        self.base = np.maximum(cells.base_rates("domain"), 1e-9)

    def label(self, cell: int) -> Label:
        read, following = self._side("read", cell), self._side("next", cell)
        own = self.places.of(slice(self.first[cell], self.first[cell + 1]))
        topic, tags = self._topic(cell, own), self._tags(cell)
        rates = {name: float(rate[cell]) for name, rate in self.kinds.items()}
        parts = self._parts(own) if rates["piece"] >= 0.5 else []
        shown, raised = self._right(cell, following, whole=bool(parts))
        about, name = (topic or list(tags))[:2], ""
        for most in range(MOST_WORDS, 0, -1):
            if parts:
                whole = ", ".join("-".join(pair) for pair in parts[:most])
                name = " → ".join(filter(None, (whole, ", ".join(raised[:most]))))
            else:
                name = _sides(read, shown[:most], about[:most], most)
            if len(name) <= NAME_LENGTH:
                break
        else:  # even with the fewest words
            name = name[: NAME_LENGTH - 1] + "…"
        return Label(
            name=name,
            description=self._description(cell, read, following, raised, topic, tags),
            category=self._category(cell, rates),
            role=role(rates),
            tags=tuple(tags),
            topic=tuple(dict.fromkeys([*("".join(pair).lower() for pair in parts), *topic])),
        )

    def _right(self, cell: int, following: Side, *, whole: bool) -> tuple[list[str], list[str]]:
        """Return the words on the right of a name, and those of them that the prototype raises."""
        kept = list(following)
        if self.count[cell] < FEW_NEXT:
            kept = []
        elif not whole and sum(following.values()) < MIN_SIDE:
            kept = kept[: MOST_WORDS - 1]
        else:
            return kept, []
        seen = {word.lower() for word in kept}
        raised = [word for word in different_words(self.raised[cell]) if word.lower() not in seen]
        raised = sorted(raised, key=_is_grammar)[: MOST_WORDS - len(kept)]
        return [*kept, *raised], raised

    def _side(self, side: str, cell: int) -> Side:
        words: dict[str, tuple[str, float]] = {}
        for word, share in self._leading(side, cell, 2 * MOST_WORDS):
            if (share < MIN_SHARE and words) or len(words) == MOST_WORDS:
                break
            written = self._written(side, cell, word)
            words.setdefault(written.lower(), (written, share))
        # A word says more to a reader than a comma that stands there more often.
        return dict(sorted(words.values(), key=lambda pair: _is_grammar(pair[0])))

    def _leading(self, side: str, cell: int, most: int) -> list[tuple[int, float]]:
        """Return the words of one side that weigh most in a cell, with their shares of places."""
        score, share = self.sides[side]
        row = slice(score.indptr[cell], score.indptr[cell + 1])
        weight: np.ndarray = np.asarray(score.data)[row]
        order = np.argsort(-weight, kind="stable")[:most]
        order = order[weight[order] > 0]
        words, shares = score.indices[row][order], share.data[row][order]
        return list(zip(words.tolist(), shares.tolist(), strict=True))

    def _written(self, side: str, cell: int, word: int) -> str:
        """Return the most frequent whole word that a token begins or is part of in a cell."""
        rows = np.arange(self.first[cell], self.first[cell + 1])
        token = (self.read if side == "read" else self.next)[rows]
        rows = rows[self.text.vocabulary.word[token] == word][:SOME]
        written = self.text.beginning if side == "read" else self.text.end
        at = self.places.position[rows] + (side == "next")
        return shown_word(most_common(written(position) for position in at.tolist()))

    def _parts(self, own: Places) -> list[tuple[str, str]]:
        """Return the most frequent words that go on after the token read, parted there."""
        at = own.position[self.text.goes_on(own)].tolist()
        begin, end = self.text.beginning, self.text.end
        pairs = Counter((begin(i).strip(), end(i + 1).lstrip("-")) for i in at)
        return [pair for pair, _ in pairs.most_common(MOST_WORDS)]

    def _topic(self, cell: int, own: Places) -> list[str]:
        """Return the leading words around, whole: their first token may be half of one."""
        near, topic = words_near(self.text, own), dict[str, None]()
        for word, _ in self._leading("about", cell, TOPIC_WORDS):
            row, column = (found[:SOME] for found in np.nonzero(near == word))
            starts = own.position[row] + 1 - BEFORE + column
            ends = (self.text.end(position).strip().lower() for position in starts.tolist())
            topic[most_common(ends)] = None
        return list(topic)

    def _tags(self, cell: int) -> dict[str, tuple[float, float]]:
        """Return domains that are there more often than elsewhere, with share and lift."""
        share = self.domain[cell]
        lift = share / self.base
        enough = (lift >= TAG_LIFT) & (share >= TAG_SHARE) & (self.count[cell] >= FEW)
        chosen = np.flatnonzero(enough)
        order = chosen[np.argsort(-share[chosen], kind="stable")][:2]
        return {self.domains[i]: (float(share[i]), float(lift[i])) for i in order}

    def _description(
        self,
        cell: int,
        read: Side,
        following: Side,
        raised: list[str],
        topic: list[str],
        tags: dict[str, tuple[float, float]],
    ) -> str:
        size = int(self.places.size[cell])
        parts = [f"Read last: {_listed(read)}. Comes next: {_listed(following)}."]
        if raised:
            parts.append(f"It raises {', '.join(raised)}.")
        if topic:
            parts.append(f"The text around has {', '.join(topic)}.")
        for name, (share, lift) in tags.items():
            parts.append(f"{share:.0%} {name}, {lift:.1f} times its share.")
        return " ".join([*parts, f"{size:,} {'place' if size == 1 else 'places'}."])

    def _category(self, cell: int, rates: dict[str, float]) -> str:
        """Return the first category whose rule holds."""
        best = int(np.argmax(self.subjects[cell]))
        of_subject = self.count[cell] >= FEW and self.subjects[cell, best] >= SUBJECT_LIFT
        numbers = max(rates["digit"], rates["time"], rates["read digit"])
        rules = (
            (rates["link"] >= 0.5, categories.LINKS),
            (max(rates["line"], rates["markup"]) >= 0.5, categories.BOILERPLATE),
            (rates["piece"] >= 0.5, categories.MORPHOLOGY),
            (rates["scaffold"] >= 0.5, categories.SCAFFOLD),
            (numbers >= 0.5, categories.NUMBERS),
            (rates["capital"] >= 0.4, categories.ENTITIES),
            (of_subject, list(categories.SUBJECTS)[best]),
            (rates["grammar"] >= 0.5, categories.SCAFFOLD),
        )
        return next((name for holds, name in rules if holds), categories.OTHER)


def shares(count: sparse.csr_matrix, places: np.ndarray) -> sparse.csr_matrix:
    """Return the share p of each cell's places that each word stands at."""
    share = count.copy()
    share.data /= np.repeat(np.maximum(places, 1), np.diff(count.indptr)).astype(np.float32)
    return share


def telling(count: sparse.csr_matrix, places: np.ndarray) -> sparse.csr_matrix:
    """Return p ln(p / base) of each word in each cell."""
    base = np.asarray(count.sum(0)).ravel() / max(1, places.sum())
    score = shares(count, places)
    score.data *= np.log(score.data / base[score.indices]).astype(np.float32)
    return score


def _weighed(
    count: sparse.csr_matrix, places: np.ndarray, weigh: Weigh
) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    score = weigh(count, places)
    # What stands once among many says nothing.
    score.data[(count.data < 2) & np.repeat(places >= FEW, np.diff(count.indptr))] = 0
    return score, shares(count, places)


def _subject_rates(hits: sparse.csr_matrix, count: np.ndarray) -> np.ndarray:
    """Return how many times as many words of each subject are near as elsewhere, [K, subjects]."""
    each = np.asarray(hits.todense())
    base = each.sum(0) / max(1, count.sum())
    # One place's worth of the mean keeps small cells from large ratios.
    return (each + base) / (np.maximum(base, 1e-9) * (count + 1)[:, None])


def _sides(read: Side, following: list[str], about: list[str], most: int) -> str:
    """Return a name of two sides, with what the text is about where these alone say little."""
    topic = f"({', '.join(about)})" if about else "…"
    left = ", ".join(list(read)[:most]) if sum(read.values()) >= MIN_SIDE else topic
    right = ", ".join(following) or "…"
    name = f"{left} → {right}"
    enough = right != "…" and not _is_grammar(name)
    return name if enough or topic in ("…", left) else f"{name} {topic}"


def _is_grammar(name: str) -> bool:
    """Say whether there is no word with content in it, nor a piece of one."""
    return all(word.lower() in FUNCTION for word in CONTENT.findall(name))


def _listed(side: Side) -> str:
    return ", ".join(f"{word} {share:.0%}" for word, share in side.items()) or "many things"
