"""What ten sequences have in common: ProtoT's rubric, by words alone or by a language model.

A unit, such as a prototype, a channel or an attention head, is judged by the ten sequences that
activate it most, with the words that do so marked. Similarities are those of weighted words,

    x_n[w] = (1 + ln tf_nw) ln((M + 1) / (df_w + ½))    of passage n, over its words not marked
    y_n[w]                                              the same, over its marked words
    s_nm   = min(2, max(cos(x_n, x_m) / θ_x, cos(y_n, y_m) / θ_y))

with df_w of M random passages of the same corpus that have w, and θ what only ``1 − QUANTILE`` of
the pairs of these exceed (θ_y at least ½): two passages with s > 1 are more alike than chance, in
what they are about or in what is marked. Average linkage, cut at s = 1, gives the themes; the
largest is the main one, C.

    themes          the number of clusters
    coverage        |C|
    disentanglement 1 + 9 · |C|/10 · max(0, w − b) / w,  rounded; 1 where |C| = 1

w is the mean s of pairs within C, b of pairs of C with other sequences; where all are in C, of
random pairs.
Source: ProtoT, §5.1, where a language model gives the figures: it is asked one question a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from prismlm.files import json_text
from prismlm.lens.labels.categories import FUNCTION
from prismlm.lens.labels.embedded import NAME_LENGTH
from prismlm.lens.labels.endpoint import (
    Answers,
    Endpoint,
    Question,
    Session,
    fenced,
    one_line,
    prompt,
)
from prismlm.lens.signatures import LINE
from prismlm.progress import SILENT, Reporter

SEQUENCES = 10
# Chosen on planted units.
QUANTILE = 0.95
LEAST_MARKED, MOST_ALIKE = 0.5, 2.0
THEME_WORDS = 4
EXPLANATION_LENGTH = 400
FIGURES = ("disentanglement", "coverage", "themes")


class Passage(NamedTuple):
    """A sequence as words.

    Attributes:
        words: as they are written, with the space before them.
        marked: places of those that activate the unit, most first.
    """

    words: tuple[str, ...]
    marked: tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """The figures of one unit.

    Attributes:
        theme: the main theme.
        disentanglement: of it from the others, 1 to 10.
        coverage: sequences that hold it, 1 to 10.
        themes: how many there are, 1 to 10.
        explanation: how that was found.
    """

    theme: str
    disentanglement: int
    coverage: int
    themes: int
    explanation: str


class WordJudge:
    """Judges by words, as the module says.

    ``random`` are passages of the same corpus, as long and with as many marked words as those that
    are to be judged; ``quantile`` is of their pairs, above which two passages are of one theme.
    """

    source = "words"

    def __init__(self, random: Sequence[Passage], quantile: float = QUANTILE) -> None:
        self.most = float(np.log((len(random) + 1) / 0.5))
        self.rarity = rarities(random)
        pairs = np.triu_indices(len(random), 1)
        text, marks = (found[pairs] for found in self._cosines(random))
        # What no pair shares is shared by chance never, and any of it would be above 0.
        self.text = max(float(np.quantile(text, quantile)), 1e-6)
        self.marks = max(float(np.quantile(marks, quantile)), LEAST_MARKED)
        self.chance = float(self._alike(text, marks).mean())

    def judge(
        self, units: Sequence[Sequence[Passage]], progress: Reporter = SILENT
    ) -> list[Judgement | None]:
        """Return the figures of units, by their passages; None is a judge's for no answer."""
        with progress.task("Judging themes", len(units), "units") as task:
            found: list[Judgement | None] = []
            for unit in units:
                found.append(self._judged(unit))
                task.advance()
        return found

    def similarities(self, unit: Sequence[Passage]) -> np.ndarray:
        """Return s of each pair of passages, float64 [n, n]."""
        return self._alike(*self._cosines(unit))

    def _judged(self, unit: Sequence[Passage]) -> Judgement:
        alike = self.similarities(unit)
        cluster = clusters(alike)
        main = cluster == 0
        coverage, themes = int(main.sum()), int(cluster.max()) + 1
        if coverage == 1:
            return Judgement(self._theme([unit[0]]), 1, 1, themes, "no two are alike beyond chance")
        within = float(alike[np.ix_(main, main)][np.triu_indices(coverage, 1)].mean())
        rest = float(alike[np.ix_(main, ~main)].mean()) if themes > 1 else self.chance
        gap = max(0.0, within - rest) / within
        theme = self._theme([passage for passage, own in zip(unit, main, strict=True) if own])
        sizes = ", ".join(map(str, np.bincount(cluster).tolist()))
        said = f"sizes {sizes}; similarity {within:.1f} within the theme, {rest:.1f} outside"
        share = coverage / len(unit)
        return Judgement(theme, 1 + round(9 * share * gap), coverage, themes, said)

    def _theme(self, passages: Sequence[Passage]) -> str:
        """Return the leading words: those marked in half or more, then the most telling."""
        least = min(2, len(passages))
        half = max(least, -(-len(passages) // 2))
        marks = Counter(word for p in passages for word in {_key(p.words[i]) for i in p.marked})
        around = Counter(word for p in passages for word in {*_keys(p)} if _content(word))
        leading = [word for word, times in self._ranked(marks) if times >= half]
        telling = [word for word, times in self._ranked(around) if times >= least]
        words = [f"“{word}”" for word in leading[:2]]
        words += [word for word in telling if word not in leading[:2]]
        said = " · ".join(words[:THEME_WORDS] or [word for word, _ in self._ranked(marks)[:1]])
        return said if len(said) <= NAME_LENGTH else said[: NAME_LENGTH - 1] + "…"

    def _ranked(self, times: Counter[str]) -> list[tuple[str, int]]:
        return sorted(times.items(), key=lambda pair: (-pair[1] * self._rarity(pair[0]), pair[0]))

    def _rarity(self, word: str) -> float:
        return self.rarity.get(word, self.most)

    def _cosines(self, passages: Sequence[Passage]) -> tuple[np.ndarray, np.ndarray]:
        marked = [[_key(p.words[i]) for i in p.marked] for p in passages]
        others = [
            [key for i, key in enumerate(_keys(p)) if i not in p.marked and _said(key)]
            for p in passages
        ]
        return self.cosine(others), self.cosine(marked)

    def cosine(self, bags: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the cosine of each pair of bags of words, [n, n]; 0 for an empty one."""
        numbers: dict[str, int] = {}
        cells = [
            (row, numbers.setdefault(word, len(numbers)), (1 + np.log(times)) * self._rarity(word))
            for row, bag in enumerate(bags)
            for word, times in Counter(bag).items()
        ]
        rows, columns, values = zip(*cells, strict=True) if cells else ((), (), ())
        x = sparse.csr_matrix((values, (rows, columns)), shape=(len(bags), max(1, len(numbers))))
        norm = np.sqrt(np.asarray(x.multiply(x).sum(1))).ravel()
        scale = sparse.diags(np.divide(1, norm, out=np.zeros_like(norm), where=norm > 0))
        unit = sparse.csr_matrix(scale @ x)
        return np.asarray(sparse.csr_matrix(unit @ unit.T).todense())

    def _alike(self, text: np.ndarray, marks: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(text / self.text, marks / self.marks), MOST_ALIKE)


def rarities(random: Sequence[Passage]) -> dict[str, float]:
    """Return ln((M + 1) / (df_w + ½)) of each word of M passages, in lower case."""
    seen = Counter(word for passage in random for word in set(_keys(passage)))
    rows = len(random) + 1
    return {word: float(np.log(rows / (times + 0.5))) for word, times in seen.items()}


def clusters(alike: np.ndarray) -> np.ndarray:
    """Return the number of each passage's theme, from 0, largest first, int64 [n]."""
    apart = MOST_ALIKE - (alike + alike.T) / 2
    np.fill_diagonal(apart, 0.0)
    tree = linkage(squareform(apart, checks=False), "average")
    found = fcluster(tree, MOST_ALIKE - 1, "distance") - 1
    order = np.argsort(-np.bincount(found), kind="stable")
    return np.argsort(order)[found]


def _key(word: str) -> str:
    bare = word.strip().lower()
    return bare or (LINE if "\n" in word else "␣")


def _keys(passage: Passage) -> list[str]:
    return [_key(word) for word in passage.words]


def _said(key: str) -> bool:
    return any(letter.isalnum() for letter in key)


def _content(word: str) -> bool:
    return len(word) > 2 and word.isalpha() and word not in FUNCTION


class EndpointJudge:
    """Asks a language model; every answer is kept in a file, and not asked for again.

    ``announce`` is told, before anything is asked, how many questions there are that are not
    answered yet, and of how many characters.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        answers: Path,
        announce: Callable[[int, int], object] = lambda questions, characters: None,
    ) -> None:
        self.announce = announce
        self.session = Session(endpoint, Answers(answers, endpoint.model))
        self.source = f"endpoint:{one_line(endpoint.model, NAME_LENGTH)}"

    def judge(
        self, units: Sequence[Sequence[Passage]], progress: Reporter = SILENT
    ) -> list[Judgement | None]:
        """Return the figures of units, None where there was no good answer."""
        questions = [theme_question(unit) for unit in units]
        new = [one for one in questions if self.session.answers.get(one) is None]
        self.announce(len(new), sum(len(m["content"]) for one in new for m in one.messages))

        def ask(number: int) -> Judgement:
            answer = self.session.ask(questions[number])
            return Judgement(
                theme=one_line(answer["theme"], NAME_LENGTH),
                explanation=one_line(answer["explanation"], EXPLANATION_LENGTH),
                **{name: answer[name] for name in FIGURES},
            )

        with progress.task("Asking for themes", len(units), "units") as task:
            found = dict(self.session.each(range(len(units)), ask, task))
        return [found.get(number) for number in range(len(units))]


def theme_question(unit: Sequence[Passage]) -> Question:
    """Return what is asked about one unit."""
    lines = [json_text({"passage": number, "text": _shown(p)}) for number, p in enumerate(unit, 1)]
    data = fenced("\n".join(lines))
    # No message of role "system": some models' templates refuse one.
    asked = f"{prompt('system')}\n\n{prompt('themes', data=data)}"
    return Question(
        ({"role": "user", "content": asked},),
        {"theme": str, **dict.fromkeys(FIGURES, int), "explanation": str},
        is_valid=lambda answer: (
            bool(one_line(answer["theme"], NAME_LENGTH))
            and all(1 <= answer[name] <= SEQUENCES for name in FIGURES)
        ),
    )


def _shown(passage: Passage) -> str:
    """Return a passage with its marks; what looks like one in it is changed."""
    plain = (word.replace("<<", "‹‹").replace(">>", "››") for word in passage.words)
    return "".join(f"<<{w}>>" if i in passage.marked else w for i, w in enumerate(plain))
