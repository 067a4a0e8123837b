"""What a question is about, and which documents and passages are worth showing for its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from prismlm.corpus.encode import encoder_of
from prismlm.explain.attribution import Passage, token_information
from prismlm.lens.lens import Lens

# A word of a question tells what it is about if each spelling has a token that is rarer than this,
# in nats, or in a corpus of N positions than this part of ln N.
TELLING, TELLING_PART = 7.5, 2 / 3
# What a document's text names counts so much beside what its title does, and is looked for in so
# many documents, the first.
TEXT_PART, READ = 0.1, 50
# Of the first so many documents or passages, most that carry at least this part of an answer's
# information and are about so much of what the first is about are about the answer's subject
# (docs/results/asked.md); without a question, most of those that carry the larger part.
CANDIDATES, WORTH_SHOWING, ALIKE, LARGE_PART, LARGE_SHARE = 1000, 0.05, 0.5, 0.15, 0.03


class Subject:
    """What a question is about: its telling words v, each with its information w(v).

    With the words that a document's title has, and those that its text has a whole spelling of,

        about = (Σ_{v in the title} w(v) + 0.1 Σ_{v in the text} w(v)) / Σ_v w(v)
    """

    def __init__(self, asked: str, lens: Lens) -> None:
        """Find the telling words; there are none where the lens has no text."""
        words = sorted(set(re.findall(r"\w+", asked)))
        self._cells, self._source = lens.cells, lens.text_source
        # Of each word: w, the word, and the rare tokens of each spelling.
        self._telling = list[tuple[float, str, list[set[int]]]]()
        self.in_text = cache(self._in_text)
        if not words or self._source is None or lens.tokenizer is None:
            return
        encode, positions = encoder_of(lens.tokenizer).text.encode_batch, len(self._cells)
        # The last is that of tokens that were added, which have no rate.
        nats = -np.log(np.append(self._cells.token_rates, 0).clip(0.5 / positions))
        rare = min(TELLING, TELLING_PART * np.log(positions))
        for word in words:
            spelt = {way(word) for way in (str, str.lower, str.upper, str.capitalize)}
            encoded = encode([*spelt, *(f" {word}" for word in spelt)], add_special_tokens=False)
            found = [{i: nats[min(i, len(nats) - 1)] for i in e.ids} for e in encoded]
            # "The" is common, however rare the tokens of "THE" are.
            least = min(max(spelling.values()) for spelling in found)
            if least >= rare:
                weight = float(token_information(np.exp(-least), positions))
                tokens = [{i for i in spelling if spelling[i] >= rare} for spelling in found]
                self._telling.append((weight, word.casefold(), tokens))

    def __bool__(self) -> bool:
        """Whether a word tells what the question is about."""
        return bool(self._telling)

    def _in_text(self, document: int) -> float:
        """Return what part of the question the text of a document names, by information."""
        assert self._source is not None
        place = int(self._cells.starts[document]), int(self._cells.lengths[document])
        tokens = set(self._source.read_tokens(*place).tolist())
        return self._part([any(one <= tokens for one in spelt) for *_, spelt in self._telling])

    def in_title(self, title: str | None) -> float:
        """Return what part of the question a title names, by information."""
        words = {word.casefold() for word in re.findall(r"\w+", title or "")}
        return self._part([word in words for _, word, _ in self._telling])

    def _part(self, named: Sequence[bool]) -> float:
        weights = [weight for weight, *_ in self._telling]
        return float(np.dot(weights, named) / sum(weights))

    def about(self, passage: Passage, *, read: bool) -> float:
        """Return how much of the question a passage's document is about, read or by its title."""
        title = self.in_title(passage.title)
        if not read:
            return title
        return title + TEXT_PART * self.in_text(self._cells.document_number(passage.doc_id))


def worth_showing(
    passages: Sequence[Passage], limit: int, subject: Subject | None = None, *, fill: bool = False
) -> list[Passage]:
    """Return the first document or passage, and others that are about the same subject.

    These carry 5 % of the answer's information, and are at least half as much about the question
    as the first. Without a question, they carry 15 %; where it is not known how much of the
    information they carry, they have 3 % of the evidence, or half as much as the first. With
    ``fill`` others follow, those first that are about most of the question.
    """

    @cache
    def about(place: int) -> float:
        return subject.about(passages[place], read=place < READ) if subject else 0.0

    def worth(place: int) -> bool:
        one = passages[place]
        if one.carried is None:
            return one.share >= min(LARGE_SHARE, passages[0].share / 2)
        if not subject or one.carried < WORTH_SHOWING:
            return one.carried >= LARGE_PART and not subject
        return about(place) >= ALIKE * about(0) and about(place) > 0

    places = range(len(passages))
    shown = [place for place in places if place == 0 or worth(place)]
    if fill:
        others = set(places) - set(shown)
        shown += sorted(others, key=lambda place: (-about(place), place))
    return [passages[place] for place in shown[:limit]]
