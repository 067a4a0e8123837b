"""How much a label says: from its text alone, can the places of a prototype be told from others?

Detection and fuzzing as delphi defines them (Paulo et al. 2024). *Detection* shows a passage and
asks whether the prototype is nearest somewhere in it, *fuzzing* shows which place is meant. The
scorer here reads words alone: a passage's score is the summed rarity of the label's words in it,

    Σ_w ln(N / n_w)   over the words w that label and passage share,

with n_w of N passages that have w. The half with the larger scores is said to fire; equal scores
are halved. The figure is the balanced accuracy, 0.5 for a label that says nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prismlm.lens.labels.embedded import Label
from prismlm.lens.labels.places import Places, Text
from prismlm.lens.labels.vocabulary import FUNCTION
from prismlm.lens.signatures import LINE
from prismlm.progress import SILENT, Reporter

# Passages of each kind a label is asked about, at most, and below which it is not scored.
MOST, LEAST = 16, 3
PASSAGE = 24
# A quoted sign is a word of a name; these are not.
NAME_SIGNS = re.compile(r"“([^”]*)”|, |[()→…]")
TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")


class Scores(NamedTuple):
    """Balanced accuracies of each label; nan where too few places were kept for it, [K].

    Attributes:
        detection, fuzzing: of the labels.
        shuffled_detection, shuffled_fuzzing: the control, each with the label of another one.
    """

    detection: np.ndarray
    fuzzing: np.ndarray
    shuffled_detection: np.ndarray
    shuffled_fuzzing: np.ndarray


# Rows of places that fire for each label, and as many that do not.
Asked = dict[int, tuple[list[int], list[int]]]


def score_labels(
    labels: Sequence[Label | None],
    text: Text,
    places: Places,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Scores:
    """Score labels on places that they were not made of."""
    asked, owner = draw_passages(labels, places, seed)
    # Words that a label's name and description have of their own.
    words = {
        cell: frozenset([*words_of(bare(label.name)), *label.topic])
        for cell, label in enumerate(labels)
        if label is not None
    }
    found = np.full((4, len(labels)), np.nan)
    with progress.task("Scoring names", 2 * len(asked), "names") as task:
        for kind, passages in enumerate(_passages(text, places, asked)):
            rarity = _rarity(list(passages.values()))
            for cell, (firing, others) in asked.items():
                seen = [passages[row] for row in [*firing, *others]]
                for shuffled, own in enumerate((cell, owner[cell])):
                    found[kind + 2 * shuffled, cell] = _accuracy(words[own], seen, rarity)
                task.advance()
    return Scores(*found)


def draw_passages(
    labels: Sequence[Label | None], places: Places, seed: int = 0
) -> tuple[Asked, dict[int, int]]:
    """Draw what each label is scored on, and whose label is its control.

    Fewer than ``LEAST`` places are too few.
    """
    generator = np.random.default_rng(seed)
    first: list[int] = np.searchsorted(places.cell, np.arange(len(labels) + 1)).tolist()
    named = np.array([label is not None for label in labels], dtype=bool)
    scored = np.flatnonzero((np.diff(first) >= LEAST) & named)
    asked: Asked = {}
    for cell in scored.tolist():
        firing = generator.permutation(np.arange(first[cell], first[cell + 1]))[:MOST]
        # One draw too many for each that could be of the cell itself.
        drawn = generator.integers(len(places.cell), size=4 * len(firing))
        others = drawn[places.cell[drawn] != cell][: len(firing)]
        if len(others) == len(firing):
            asked[cell] = firing.tolist(), others.tolist()
    order = generator.permutation(len(scored))
    return asked, dict(zip(scored[order].tolist(), scored[np.roll(order, 1)].tolist(), strict=True))


def bare(name: str) -> str:
    """Return a name without the signs that part its words: “(”, the → a (fur) says ( the a fur."""
    return NAME_SIGNS.sub(lambda found: f" {found[1] or ''} ", name)


def content_words(text: str) -> tuple[str, ...]:
    """Return the words of a text that say what it is about, each once."""
    words = dict.fromkeys(words_of(text))
    return tuple(word for word in words if word.isalnum() and word not in FUNCTION)


def words_of(text: str) -> list[str]:
    """Return the words and signs of a text, in lower case; ends of lines are a sign."""
    return TOKEN.findall(text.lower().replace("\n", LINE))


def _passages(
    text: Text, places: Places, asked: Asked
) -> tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]]:
    """Return the words of every passage that is asked about, and of its marked place."""
    rows = sorted({row for pair in asked.values() for kind in pair for row in kind})
    some = places.of(np.array(rows, dtype=np.int64))
    texts = np.array([*text.vocabulary.texts, ""], dtype=object)
    windows = text.window(some, PASSAGE, 1)
    whole = [frozenset(words_of("".join(texts[window]))) for window in windows]
    marked = [
        frozenset(words_of(f"{text.beginning(position)} {text.end(position + 1)}"))
        for position in some.position.tolist()
    ]
    return dict(zip(rows, whole, strict=True)), dict(zip(rows, marked, strict=True))


def _rarity(passages: Sequence[frozenset[str]]) -> dict[str, float]:
    seen = Counter(word for passage in passages for word in passage)
    return {word: float(np.log(len(passages) / times)) for word, times in seen.items()}


def _accuracy(
    label: frozenset[str], passages: Sequence[frozenset[str]], rarity: dict[str, float]
) -> float:
    """Return the balanced accuracy of a label; the first half of the passages fire."""
    scores = np.array([sum(rarity[word] for word in label & passage) for passage in passages])
    half = len(scores) // 2
    least = np.sort(scores)[half]
    above, equal = scores > least, scores == least
    # Of those that are equal at the border, so many are said to fire that it is half of all.
    said = above + equal * ((half - above.sum()) / equal.sum())
    return float((said[:half].mean() + 1 - said[half:].mean()) / 2)
