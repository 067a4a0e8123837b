"""Names without a language model, from the words that distinguish the positions of a cell.

A name has the words that are read last at these positions, and those that come next,

    read last → comes next

ranked by p(w | cell) ln(p(w | cell) / p(w)), one term of a Kullback–Leibler divergence. Where the
words read last vary, words of the surrounding text take their place, in brackets, ranked in the
same way; they come last if both sides have only grammar and punctuation. Where most positions are
inside a word, the whole word is shown, split at the prototype's position: Li-ouville, Ha-usdorff.
With fewer than ten positions, the next words are chance, and the tokens that the prototype raises
take their place; where the next words vary, these tokens follow them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from prismlm.lens.cells import Cells
from prismlm.lens.labels import contexts
from prismlm.lens.labels.contexts import FEW, FUNCTION, Places, Text
from prismlm.lens.signatures import MOST_WORDS, different_words, shown_word
from prismlm.progress import SILENT, Reporter

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


@dataclass(frozen=True)
class Label:
    """The name of a prototype.

    ``category`` is one of :data:`~prismlm.lens.labels.contexts.CATEGORIES`, ``role`` the kind of
    word that comes next, ``tags`` are overrepresented domains, ``topic`` words of the surrounding
    text.
    """

    name: str
    description: str
    category: str
    role: str
    tags: tuple[str, ...]
    topic: tuple[str, ...] = ()


class Namer:
    """Names cells from the rates of words, kinds, subjects and domains in each.

    ``raised`` are the tokens of each prototype's signature.
    """

    def __init__(
        self,
        text: Text,
        places: Places,
        cells: Cells,
        subject_words: sparse.csr_matrix,
        raised: Sequence[Sequence[str]],
    ) -> None:
        self.text, self.places, self.raised = text, places, raised
        num_cells, word = len(places.size), text.word
        self.first = np.searchsorted(places.cell, np.arange(num_cells + 1))
        self.count = np.diff(self.first)
        self.tokens = {"read": text.read(places), "next": text.next(places)}
        shape = num_cells, len(text.words)
        counts = {
            "read": contexts.count_words(places.cell, word[self.tokens["read"]], shape),
            "next": contexts.count_words(places.cell, word[self.tokens["next"]], shape),
            "about": contexts.count_content_words(text, places, shape),
        }
        self.sides = {
            side: (_scores(count, self.count), shares(count, self.count))
            for side, count in counts.items()
        }
        self.kinds = contexts.kind_rates(text, places, num_cells)
        # How many times as many words of each subject are near as elsewhere, [K, subjects]. One
        # position's worth of the mean is added, which bounds the ratios of small cells.
        hits = sparse.csr_array(counts["about"] @ subject_words).toarray()
        base = hits.sum(0) / max(1, self.count.sum())
        self.subjects = (hits + base) / (np.maximum(base, 1e-9) * (self.count + 1)[:, None])
        self.domains, codes = cells.keys("domain")
        self.domain = np.zeros((num_cells, len(self.domains)))
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
        read, following, tags = self._side("read", cell), self._side("next", cell), self._tags(cell)
        places = self.places.of(slice(self.first[cell], self.first[cell + 1]))
        topic = self._topic(cell, places)
        rates = {name: float(rate[cell]) for name, rate in self.kinds.items()}
        pieces = self._split_words(places) if rates["piece"] >= 0.5 else []
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
        parts += [f"{p:.0%} {tag}, {lift:.1f} times its share." for tag, (p, lift) in tags.items()]
        size = int(self.places.size[cell])
        parts.append(f"{size:,} {'place' if size == 1 else 'places'}.")
        return Label(
            name,
            " ".join(parts),
            contexts.category(rates, self.subjects[cell], self.count[cell]),
            contexts.role(rates),
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
        """Return the words of one side as they are shown."""
        words: dict[str, tuple[str, float]] = {}
        for word, share in self._top_words(side, cell, 2 * MOST_WORDS):
            if (share < MIN_SHARE and words) or len(words) == MOST_WORDS:
                break
            spelled = self._spelled(side, cell, word)
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

    def _spelled(self, side: str, cell: int, word: int) -> str:
        """Return the most frequent whole word that a token starts or is part of in a cell."""
        rows = np.arange(self.first[cell], self.first[cell + 1])
        rows = rows[self.text.word[self.tokens[side][rows]] == word][:SPELLINGS]
        spell = self.text.beginning if side == "read" else self.text.end
        positions = self.places.position[rows] + (side == "next")
        return shown_word(contexts.most_common(map(spell, positions.tolist())))

    def _split_words(self, places: Places) -> list[tuple[str, str]]:
        """Return the most frequent words that continue, split after the token read last."""
        positions = places.position[self.text.continues(places)].tolist()
        begin, end = self.text.beginning, self.text.end
        pairs = Counter((begin(i).strip(), end(i + 1).lstrip("-")) for i in positions)
        return [pair for pair, _ in pairs.most_common(MOST_WORDS)]

    def _topic(self, cell: int, places: Places) -> list[str]:
        """Return the top words of the surrounding text, whole."""
        near, topic = contexts.words_near(self.text, places), dict[str, None]()
        for word, _ in self._top_words("about", cell, TOPIC_WORDS):
            row, column = (index[:SPELLINGS] for index in np.nonzero(near == word))
            starts = places.position[row] + 1 - contexts.BEFORE + column
            ends = (self.text.end(position).strip().lower() for position in starts.tolist())
            topic[contexts.most_common(ends)] = None
        return list(topic)

    def _tags(self, cell: int) -> dict[str, tuple[float, float]]:
        """Return overrepresented domains, with share and lift."""
        share = self.domain[cell]
        lift = share / self.base
        enough = (lift >= TAG_LIFT) & (share >= TAG_SHARE) & (self.count[cell] >= FEW)
        overrepresented = np.flatnonzero(enough)
        order = overrepresented[np.argsort(-share[overrepresented], kind="stable")][:2]
        return {self.domains[i]: (float(share[i]), float(lift[i])) for i in order}


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


def _scores(count: sparse.csr_matrix, positions: np.ndarray) -> sparse.csr_matrix:
    """Return the distinctiveness of words, 0 for those that occur once in a cell of many."""
    score = distinctiveness(count, positions)
    score.data[(count.data < 2) & np.repeat(positions >= FEW, np.diff(count.indptr))] = 0
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
