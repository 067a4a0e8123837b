"""How much a name says: can the positions of a prototype be told from others by its words?

Detection and fuzzing as delphi defines them (Paulo et al. 2024): *detection* asks whether the
prototype is nearest somewhere in a passage, *fuzzing* whether it is at the marked position. The
scorer here compares words alone. The score of a passage is the rarity of the words w that it
shares with the name,

    Σ_w ln(N / n_w),   n_w of N passages having w.

The half of the passages with the larger scores is predicted positive, with ties split evenly. The
result is the balanced accuracy, 0.5 for an uninformative name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prismlm.lens.labels.categories import FUNCTION
from prismlm.lens.labels.embedded import Label
from prismlm.lens.labels.places import Places, Text
from prismlm.lens.signatures import LINE
from prismlm.progress import SILENT, Reporter

# Positive passages of a label at most, and at least for it to be scored.
MOST, LEAST = 16, 3
PASSAGE = 24
# Quoted signs are words of a name; the others separate them.
NAME_SIGNS = re.compile(r"“([^”]*)”|, |[()→…]")
TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")


class Scores(NamedTuple):
    """Balanced accuracies of labels, and of labels of other cells as a control; nan if unscored."""

    detection: np.ndarray
    fuzzing: np.ndarray
    shuffled_detection: np.ndarray
    shuffled_fuzzing: np.ndarray


# Rows of positive places of each label, and of as many negative ones.
Passages = dict[int, tuple[list[int], list[int]]]


def score_labels(
    labels: Sequence[Label | None],
    text: Text,
    places: Places,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Scores:
    """Score labels on held-out places."""
    drawn, control = draw_passages(labels, places, seed)
    words = {
        cell: frozenset([*words_of(bare(label.name)), *label.topic])
        for cell, label in enumerate(labels)
        if label is not None
    }
    scores = np.full((4, len(labels)), np.nan)
    with progress.task("Scoring names", 2 * len(drawn), "names") as task:
        for kind, passages in enumerate(_words_of_passages(text, places, drawn)):
            counts = Counter(word for passage in passages.values() for word in passage)
            rarity = {word: float(np.log(len(passages) / n)) for word, n in counts.items()}
            for cell, (positive, negative) in drawn.items():
                chosen = [passages[row] for row in [*positive, *negative]]
                scores[kind, cell] = _accuracy(words[cell], chosen, rarity)
                scores[kind + 2, cell] = _accuracy(words[control[cell]], chosen, rarity)
                task.advance()
    return Scores(*scores)


def draw_passages(
    labels: Sequence[Label | None], places: Places, seed: int = 0
) -> tuple[Passages, dict[int, int]]:
    """Draw positive and negative passages for each label, and the label that is its control."""
    generator = np.random.default_rng(seed)
    first: list[int] = np.searchsorted(places.cell, np.arange(len(labels) + 1)).tolist()
    named = np.array([label is not None for label in labels], dtype=bool)
    scored = np.flatnonzero((np.diff(first) >= LEAST) & named)
    drawn: Passages = {}
    for cell in scored.tolist():
        positive = generator.permutation(np.arange(first[cell], first[cell + 1]))[:MOST]
        # More than needed, since some may be of the cell itself.
        others = generator.integers(len(places.cell), size=4 * len(positive))
        negative = others[places.cell[others] != cell][: len(positive)]
        if len(negative) == len(positive):
            drawn[cell] = positive.tolist(), negative.tolist()
    order = scored[generator.permutation(len(scored))]
    return drawn, dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))


def bare(name: str) -> str:
    """Return a name without separators: “(”, the → a (fur) becomes ( the a fur."""
    return NAME_SIGNS.sub(lambda sign: f" {sign[1] or ''} ", name)


def content_words(text: str) -> tuple[str, ...]:
    """Return the distinct content words of a text."""
    words = dict.fromkeys(words_of(text))
    return tuple(word for word in words if word.isalnum() and word not in FUNCTION)


def words_of(text: str) -> list[str]:
    """Return the words and signs of a text, in lower case; a line break is a sign."""
    return TOKEN.findall(text.lower().replace("\n", LINE))


def _words_of_passages(
    text: Text, places: Places, drawn: Passages
) -> tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]]:
    """Return the words of every passage, and those at its marked position."""
    rows = sorted({row for pair in drawn.values() for kind in pair for row in kind})
    chosen = places.of(np.array(rows, dtype=np.int64))
    texts = np.array([*text.vocabulary.texts, ""], dtype=object)
    windows = text.window(chosen, PASSAGE, 1)
    passages = [frozenset(words_of("".join(texts[window]))) for window in windows]
    marked = [
        frozenset(words_of(f"{text.beginning(position)} {text.end(position + 1)}"))
        for position in chosen.position.tolist()
    ]
    return dict(zip(rows, passages, strict=True)), dict(zip(rows, marked, strict=True))


def _accuracy(
    label: frozenset[str], passages: Sequence[frozenset[str]], rarity: dict[str, float]
) -> float:
    """Return the balanced accuracy of a label; the first half of the passages is positive."""
    scores = np.array([sum(rarity[word] for word in label & passage) for passage in passages])
    half = len(scores) // 2
    threshold = np.sort(scores)[half]
    above, equal = scores > threshold, scores == threshold
    # Ties at the threshold share what is left of the positive half.
    predicted = above + equal * ((half - above.sum()) / equal.sum())
    return float((predicted[:half].mean() + 1 - predicted[half:].mean()) / 2)
