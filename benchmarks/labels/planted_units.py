"""Units whose sequences are of so many themes as is known: passages of a corpus, drawn by seed."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from prismlm.corpus import Corpus
from prismlm.corpus.words import WordedText, worded
from prismlm.labels.themes import SEQUENCES, Passage

SIDE = 32  # tokens on either side of a mark
LEAST_DOCUMENTS = 20
KINDS = ("word", "document", "topic")


class Planted(NamedTuple):
    """Ten passages of ``themes`` themes, the largest of which has ``coverage``."""

    kind: str
    themes: int
    coverage: int
    passages: tuple[Passage, ...]


class Sample:
    """Passages of a corpus's documents, by what they have in common.

    A *word*: passages of different documents whose marked word is the same. A *document*: passages
    of one document that do not overlap. A *topic*: passages of documents of one source, such as one
    subject of a journal.

    Args:
        corpus: the text.
        half: of its documents, 0 or 1, so that nothing is judged that thresholds were chosen on.
        seed: of all draws.
    """

    def __init__(self, corpus: Corpus, half: int, seed: int = 0) -> None:
        self.draw = np.random.default_rng([seed, half])
        self.numbers = np.flatnonzero(corpus.lengths > 2 * SIDE)[half::2].tolist()
        self.texts: dict[int, WordedText] = {}
        for number, spans in zip(self.numbers, map(corpus.spans, self.numbers), strict=True):
            self.texts[number] = worded(corpus.text(number), spans[:-1])
        self.weights = corpus.lengths[self.numbers] / corpus.lengths[self.numbers].sum()
        sources, by_source = corpus.column("source"), defaultdict[str, list[int]](list)
        self.at: dict[str, dict[int, int]] = defaultdict(dict)
        for number in self.numbers:
            by_source[str(sources[number])].append(number)
            text = self.texts[number]
            for token, word in enumerate(text.word_of):
                if (key := text.words[word].strip().lower()).isalpha():
                    self.at[key].setdefault(number, token)
        self.sources = [own for own in by_source.values() if len(own) >= LEAST_DOCUMENTS]
        self.words = sorted(w for w, own in self.at.items() if len(own) >= LEAST_DOCUMENTS)
        self.long = [n for n in self.numbers if corpus.lengths[n] > (2 * SIDE + 1) * SEQUENCES]

    def unit(self, kind: str, themes: int) -> Planted:
        """Return ten passages of so many themes, in parts as large as chance has it."""
        cuts = np.sort(self.draw.choice(np.arange(1, SEQUENCES), themes - 1, replace=False))
        sizes = np.diff([0, *cuts, SEQUENCES]).tolist()
        pool = {"word": self.words, "document": self.long, "topic": self.sources}[kind]
        chosen = self.draw.choice(len(pool), themes, replace=False).tolist()
        found: list[Passage] = []
        for size, number in zip(sizes, chosen, strict=True):
            found += self._part(kind, pool[number], size)
        return Planted(kind, themes, max(sizes), tuple(found))

    def random(self) -> Passage:
        """Return a random place of a random document, by its length."""
        return self._anywhere(int(self.draw.choice(self.numbers, p=self.weights)))

    def _part(self, kind: str, theme: object, size: int) -> list[Passage]:
        if isinstance(theme, str):
            places = self.at[theme]
            chosen = self.draw.choice([*places], size, replace=False).tolist()
            return [self._passage(number, places[number]) for number in chosen]
        if isinstance(theme, list):
            chosen = self.draw.choice(theme, size, replace=False).tolist()
            return [self._anywhere(number) for number in chosen]
        assert isinstance(theme, int)
        width = 2 * SIDE + 1
        slots = self.draw.choice(len(self.texts[theme].tokens) // width, size, replace=False)
        return [self._passage(theme, int(slot) * width + SIDE) for slot in slots]

    def _anywhere(self, number: int) -> Passage:
        return self._passage(number, int(self.draw.integers(len(self.texts[number].tokens))))

    def _passage(self, number: int, token: int) -> Passage:
        text = self.texts[number]
        first, last = max(0, token - SIDE), min(len(text.tokens), token + SIDE + 1)
        words = slice(text.word_of[first], text.word_of[last - 1] + 1)
        return Passage(text.words[words], (text.word_of[token] - words.start,))
