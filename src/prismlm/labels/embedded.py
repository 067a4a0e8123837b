"""Names without a model: what is read, what comes next, and what the text around is about.

A prototype is nearest to some positions of a corpus. Its name has the words that set these apart,

    read last → comes next

each by how much it tells this cell from all places, p(w | cell) ln(p(w | cell) / p(w)), one term of
a Kullback–Leibler divergence. Where what was read varies, words of the text around stand for it, in
brackets, chosen by the same measure over the places that they are near; they come last where both
sides have only words of grammar and signs. Where mostly a word goes on, it is shown whole, parted
where the prototype is: Li-ouville, Ha-usdorff. Where a cell has less than ten places, what came
next there is chance, and the tokens that tell the prototype stand for it; where what came next
varies, they follow it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import sparse

from prismlm.index.cells import Cells
from prismlm.index.signatures import MOST_WORDS, different_words, shown_word
from prismlm.labels import categories
from prismlm.labels.places import (
    SOME,
    Places,
    Text,
    around,
    counts,
    most_common,
    whole_word,
    words_near,
)
from prismlm.labels.vocabulary import FUNCTION, kind_rates, role
from prismlm.progress import SILENT, Reporter

# A side of a name tells something from this share of the places on.
LEAST_SHARE, LEAST_SIDE = 0.05, 0.15
NAME_LENGTH = 48
TOPIC_WORDS = 5
TAG_LIFT, TAG_SHARE = 2.0, 0.3
# A cell with fewer places has words of its own by accident.
FEW = 5
# And what comes next in so few tells less of what a prototype predicts than what it raises.
FEW_NEXT = 10
SUBJECT_LIFT = 3.0
# Letters enough to be a word or a piece of one that says something.
CONTENT = re.compile(r"[^\W\d_]{3,}")

# What each word of each cell weighs, of how often it is there and how many places each cell has.
Weigh = Callable[[sparse.csr_matrix, np.ndarray], sparse.csr_matrix]


@dataclass(frozen=True)
class Label:
    """What a prototype is called.

    Attributes:
        name: a short one, what is read last → what comes next, or where words are parted.
        description: one sentence or two, with shares.
        category: one of :data:`~prismlm.labels.categories.CATEGORIES`.
        role: what kind of word comes next.
        tags: domains of the corpus that its places are of more often than others.
        topic: words of the text around, which the description has too.
    """

    name: str
    description: str
    category: str
    role: str
    tags: tuple[str, ...]
    topic: tuple[str, ...] = ()


class Side(NamedTuple):
    """Words of one side of a cell: as they are written, and their share of the places."""

    words: list[str]
    shares: list[float]


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
    found = _Statistics(text, places, cells, subject_words, raised, weigh or telling)
    labels: list[Label | None] = []
    with progress.task("Naming prototypes", len(places.size), "prototypes") as task:
        for cell in range(len(places.size)):
            labels.append(found.label(cell) if found.count[cell] else None)
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
        self.text, self.places, kinds = text, places, text.vocabulary
        self.raised = raised
        num_cells, words = len(places.size), len(kinds.words)
        self.first = np.searchsorted(places.cell, np.arange(num_cells + 1))
        self.count = np.diff(self.first)
        self.read, self.next = text.read(places), text.next(places)
        near = around(text, places, num_cells)
        read, following = (
            counts(places.cell, kinds.word[token], num_cells, words)
            for token in (self.read, self.next)
        )
        sides = {"read": read, "next": following, "about": near}
        self.sides = {name: _weighed(side, self.count, weigh) for name, side in sides.items()}
        self.kinds = kind_rates(text, places, self.read, self.next, num_cells)
        self.subjects = _subject_rates(near @ subject_words, self.count)
        self.domains, codes = cells.keys("domain")
        self.domain = np.zeros((num_cells, len(self.domains)))
        np.add.at(self.domain, (places.cell, codes[places.document]), 1.0)
        self.domain /= np.maximum(self.count, 1)[:, None]
        self.base = np.maximum(cells.base_rates("domain"), 1e-9)

    def label(self, cell: int) -> Label:
        read, following = self._side("read", cell), self._side("next", cell)
        topic, tags = self._topic(cell), self._tags(cell)
        rates = {name: float(rate[cell]) for name, rate in self.kinds.items()}
        parts = self._parts(cell) if rates["piece"] >= 0.5 else []
        whole = ["-".join(one) for one in parts]
        about = topic or [tag for tag, _, _ in tags]
        right, raised = self._right(cell, following, parts)
        names = [
            " → ".join(filter(None, (", ".join(whole[:most]), ", ".join(raised[:most]))))
            if parts
            else _sides(read, right[:most], about[: min(most, 2)], most)
            for most in range(MOST_WORDS, 0, -1)
        ]
        # Where all are too long, the one with the fewest words is cut.
        name = next((one for one in names if len(one) <= NAME_LENGTH), names[-1])
        topic = list(dict.fromkeys([*("".join(one).lower() for one in parts), *topic]))
        return Label(
            name=_cut(name),
            description=self._description(cell, read, following, raised, topic, tags),
            category=self._category(cell, rates),
            role=role(rates),
            tags=tuple(tag for tag, _, _ in tags),
            topic=tuple(topic),
        )

    def _right(
        self, cell: int, following: Side, parts: list[tuple[str, str]]
    ) -> tuple[list[str], list[str]]:
        """Return the words on the right of a name, and those of them that are of the prototype."""
        kept = following.words
        if self.count[cell] < FEW_NEXT:
            kept = []
        elif not parts and sum(following.shares) < LEAST_SIDE:
            kept = kept[: MOST_WORDS - 1]
        else:
            return kept, []
        there = {word.lower() for word in kept}
        told = [word for word in different_words(self.raised[cell]) if word.lower() not in there]
        told = sorted(told, key=lambda word: not _says(word))[: MOST_WORDS - len(kept)]
        return [*kept, *told], told

    def _side(self, name: str, cell: int) -> Side:
        written: list[str] = []
        shares: list[float] = []
        for word, part in self._leading(name, cell, 2 * MOST_WORDS):
            if (part < LEAST_SHARE and written) or len(written) == MOST_WORDS:
                break
            shown = self._written(name, cell, word)
            if shown.lower() not in (one.lower() for one in written):
                written.append(shown)
                shares.append(part)
        # A word says more to a reader than a comma that stands there more often.
        pairs = sorted(zip(written, shares, strict=True), key=lambda pair: not _says(pair[0]))
        return Side([word for word, _ in pairs], [share for _, share in pairs])

    def _leading(self, name: str, cell: int, most: int) -> list[tuple[int, float]]:
        """Return the words of one side that tell most of a cell, and their shares of the places."""
        score, share = self.sides[name]
        row = slice(score.indptr[cell], score.indptr[cell + 1])
        told: np.ndarray = np.asarray(score.data)[row]
        order = np.argsort(-told, kind="stable")[:most]
        order = order[told[order] > 0]
        words, parts = score.indices[row][order], share.data[row][order]
        return list(zip(words.tolist(), parts.tolist(), strict=True))

    def _written(self, name: str, cell: int, word: int) -> str:
        """Return the most frequent whole word that a token begins or is part of in a cell."""
        rows = np.arange(self.first[cell], self.first[cell + 1])
        token = (self.read if name == "read" else self.next)[rows]
        rows = rows[self.text.vocabulary.word[token] == word][:SOME]
        written = self.text.beginning if name == "read" else self.text.end
        at = self.places.position[rows] + (name == "next")
        return shown_word(most_common(written(position) for position in at.tolist()))

    def _parts(self, cell: int) -> list[tuple[str, str]]:
        """Return the most frequent words that go on after the token read, parted there."""
        own = self.places.of(slice(self.first[cell], self.first[cell + 1]))
        at = own.position[self.text.goes_on(own)].tolist()
        begin, end = self.text.beginning, self.text.end
        pairs = Counter((begin(i).strip(), end(i + 1).lstrip("-")) for i in at)
        return [pair for pair, _ in pairs.most_common(MOST_WORDS)]

    def _topic(self, cell: int) -> list[str]:
        own = self.places.of(slice(self.first[cell], self.first[cell + 1]))
        near = words_near(self.text, own)
        leading = self._leading("about", cell, TOPIC_WORDS)
        return list(dict.fromkeys(whole_word(self.text, own, near, word) for word, _ in leading))

    def _tags(self, cell: int) -> list[tuple[str, float, float]]:
        if self.count[cell] < FEW:
            return []
        share = self.domain[cell]
        lift = share / self.base
        chosen = np.flatnonzero((lift >= TAG_LIFT) & (share >= TAG_SHARE))
        order = chosen[np.argsort(-share[chosen], kind="stable")][:2]
        return [(self.domains[i], float(share[i]), float(lift[i])) for i in order]

    def _description(
        self,
        cell: int,
        read: Side,
        following: Side,
        raised: list[str],
        topic: list[str],
        tags: list[tuple[str, float, float]],
    ) -> str:
        size = int(self.places.size[cell])
        parts = [f"Read last: {_listed(read)}. Comes next: {_listed(following)}."]
        if raised:
            parts.append(f"It raises {', '.join(raised)}.")
        if topic:
            parts.append(f"The text around has {', '.join(topic)}.")
        parts += [f"{share:.0%} {name}, {lift:.1f} times its share." for name, share, lift in tags]
        return " ".join([*parts, f"{size:,} {'place' if size == 1 else 'places'}."])

    def _category(self, cell: int, rates: dict[str, float]) -> str:
        if rates["link"] >= 0.5:
            return categories.LINKS
        if rates["line"] >= 0.5 or rates["markup"] >= 0.5:
            return categories.BOILERPLATE
        if rates["piece"] >= 0.5:
            return categories.MORPHOLOGY
        if rates["scaffold"] >= 0.5:
            return categories.SCAFFOLD
        if max(rates["digit"], rates["time"], rates["read digit"]) >= 0.5:
            return categories.NUMBERS
        if rates["capital"] >= 0.4:
            return categories.ENTITIES
        best = int(np.argmax(self.subjects[cell]))
        if self.count[cell] >= FEW and self.subjects[cell, best] >= SUBJECT_LIFT:
            return list(categories.SUBJECTS)[best]
        return categories.SCAFFOLD if rates["grammar"] >= 0.5 else categories.OTHER


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
    around = f"({', '.join(about)})" if about else "…"
    left = ", ".join(read.words[:most]) if sum(read.shares) >= LEAST_SIDE else around
    right = ", ".join(following) or "…"
    name = f"{left} → {right}"
    enough = right != "…" and _says(name)
    return name if enough or around in ("…", left) else f"{name} {around}"


def _says(name: str) -> bool:
    """Say whether there is a word with content in it, or a piece of one."""
    return any(word.lower() not in FUNCTION for word in CONTENT.findall(name))


def _listed(side: Side) -> str:
    if not side.words:
        return "many things"
    return ", ".join(f"{w} {s:.0%}" for w, s in zip(side.words, side.shares, strict=True))


def _cut(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"
