"""How well the corpus supports an answer: a level, a summary in words, and its verbatim spans.

A prediction of the token y counts by the information of y under the corpus, p(y) being the share of
its positions after which y came next:

    w_t = ε + max(0, −ln p(y_t) − c)²

so that names count, and "the" hardly does. Shares, documents and passages are sums of w_t times the
evidence of each prediction. c = 5 and the square ranked the document that holds an answer first
most often, on questions to a model that half knew its texts (docs/results/asked.md).

A document carries a prediction if one of its positions came before the same token, in a state at
least as near as the nearest of half the predictions of unseen text (:mod:`prismlm.lens.support`).
Each distinct token y of the answer counts once, and support is the largest part of the answer's
information that one document carries:

    s = max_d  Σ_{y carried by d} w(y) / Σ_y w(y)

Many documents that share a word each are not about the answer; one document that has its names and
terms together is. Strong is s ≥ 0.8, none s < 0.25; docs/results/asked.md has the error rates, on
questions that these bounds were not chosen on. An answer of common words alone, with Σ_y w(y) < 1,
has nothing that a document could hold, and is weak.

Verbatim spans follow OLMoTrace (Liu et al. 2025): from every token on, the longest run of tokens
that occurs in some document; runs within a longer one are dropped, long and rare ones come first.
They say where a text occurs, not whether the model took it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from prismlm.lens.cells import UNKNOWN
from prismlm.lens.lens import Lens
from prismlm.lens.suffixes import Suffixes

if TYPE_CHECKING:
    from prismlm.explain.attribution import Passage, Share, Sources

# c in nats, and ε.
COMMON, MIN_WEIGHT = 5.0, 0.01
STRONG, NONE = 0.8, 0.25
MIN_INFORMATION = 1.0
Level = Literal["strong", "weak", "none"]
WORDS: dict[Level, str] = {
    "strong": "one document of this corpus holds nearly all that the answer tells",
    "weak": "this corpus holds only parts of what the answer tells",
    "none": "nothing in this corpus is about the answer",
}
LEVELS: tuple[Level, ...] = get_args(Level)
# A summary says "mostly" of a domain with more than half of the attributed evidence. How often such
# a domain is the text's own is in docs/results/domains.md.
HALF = 0.5
# With less of the evidence attributed, the summary names no source.
MIN_ATTRIBUTED = 0.05
# A domain with a smaller lift is as frequent as usual.
MIN_LIFT = 1.25
# A smaller share is "less than 1%".
MIN_PERCENT = 0.005
# Tokens of a verbatim span, and the positions named for each.
MIN_SPAN = 5
SPAN_PLACES = 5


@dataclass(frozen=True)
class Support:
    """The support of an answer."""

    level: Level  # strong from 0.8 on, none below 0.25
    score: float  # s, the largest part of the answer's information that one document carries

    @property
    def sentence(self) -> str:
        """The level as a sentence."""
        return sentence(self.level)

    @property
    def sums(self) -> dict[str, float]:
        """The level, as a count of one, and the score: to be summed over texts."""
        return {self.level: 1, "score": self.score}

    def to_dict(self) -> dict[str, Any]:
        """Return the part of ``prismlm explain --json``."""
        return asdict(self)


def sentence(level: Level) -> str:
    """Return a level as a sentence."""
    return f"{'No' if level == 'none' else level.capitalize()} support: {WORDS[level]}."


class Coverage(NamedTuple):
    """Which documents carry which of T predictions."""

    tokens: np.ndarray  # the predicted tokens, int64 [T]
    weights: np.ndarray  # w of each, float64 [T]
    carried: np.ndarray  # (prediction, document) pairs, int64 [m, 2]

    @classmethod
    def joined(cls, parts: Sequence[Coverage]) -> Coverage:
        """Return the coverage of successive predictions."""
        firsts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        shifted = [
            part._replace(carried=part.carried + np.array([first, 0]))
            for part, first in zip(parts, firsts, strict=False)
        ]
        return cls(*(np.concatenate(column) for column in zip(*shifted, strict=True)))

    def by_document(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return documents, int [m], the part of Σ_y w(y) that each carries, and Σ_y w(y)."""
        distinct, number = np.unique(self.tokens, return_inverse=True)
        weight = np.zeros(len(distinct))
        weight[number] = self.weights
        prediction, document = self.carried.T
        pairs = np.unique(document * len(distinct) + number[prediction])
        documents, owner = np.unique(pairs // len(distinct), return_inverse=True)
        sums = np.bincount(owner, weight[pairs % len(distinct)], minlength=len(documents))
        return documents, sums / weight.sum(), float(weight.sum())

    def support(self) -> Support:
        """Return the support of the predictions."""
        _, shares, information = self.by_document()
        score = float(shares.max(initial=0))
        if information < MIN_INFORMATION or NONE <= score < STRONG:
            return Support("weak", score)
        return Support("strong" if score >= STRONG else "none", score)


def token_information(rates: np.ndarray, positions: int) -> np.ndarray:
    """Return w of tokens with these rates; one that never comes next counts as half a position."""
    nats = np.maximum(0.0, -np.log(np.maximum(rates, 0.5 / positions)) - COMMON)
    return MIN_WEIGHT + nats**2


def support_counts(sums: Mapping[str, float]) -> dict[str, Any] | None:
    """Return how many texts have each level, and their mean score, from summed ``Support.sums``."""
    levels = {level: int(sums[level]) for level in LEVELS}
    texts = sum(levels.values())
    return {"levels": levels, "score": sums["score"] / texts} if texts else None


def summarise(
    subject: str, shares: Sources, document: Passage | None, support: Support | None, documents: int
) -> str:
    """Return what some predictions draw on, in at most two sentences with one figure each.

    The domain named has the largest p log(p / q), with its part p of what is attributed and its
    share q of the corpus: a large part of a large domain has little information. Figures are shares
    of all evidence, as in tables. ``subject`` is such as "the answer", ``shares`` are by domain, or
    by source if all documents have one domain, and ``document`` has the largest share.
    """
    if support is not None and support.level == "none":
        return support.sentence
    attributed = 1 - shares.unattributed
    if not shares.items or attributed < MIN_ATTRIBUTED:
        return f"Almost none of the evidence for {subject} could be traced to this corpus."
    traced = f"{percent(attributed)} of the evidence for {subject} was traced to"
    if documents == 1:
        return f"{traced} the only document of this corpus."

    def information(share: Share) -> float:
        p = share.share / attributed
        return p * math.log(p / share.base_rate) if share.base_rate else p

    leading = max(shares.items, key=information)
    if leading.base_rate is not None and leading.base_rate > 1 - 1e-9:
        text = f"{traced} this corpus."
    elif leading.lift and leading.lift < attributed * MIN_LIFT:
        text = f"{subject} draws on no {shares.by} much more than the corpus holds of it."
    else:
        known = f"the {shares.by} “{leading.key}”"
        name = known if leading.key != UNKNOWN else f"text of unknown {shares.by}"
        degree = "mostly" if leading.share > HALF * attributed else "more than usual"
        first = leading is shares.items[0]
        text = f"{subject} draws {degree if first else 'more than usual'} on {name}: "
        text += f"{percent(leading.share)} of its evidence."
    if document is not None:
        title = " ".join((document.title or document.doc_id).split())
        share = percent(document.share)
        text += f" The document that contributes most is “{title}”, with {share}."
    return text[0].upper() + text[1:]


def percent(share: float) -> str:
    """Return a share in whole per cent, for a sentence."""
    return f"{share:.0%}" if share >= MIN_PERCENT else "less than 1%"


class VerbatimSpan(NamedTuple):
    """A span of a text that occurs in the corpus, and lies in no longer one that does."""

    start: int  # its first token, counted from 0 in the text
    length: int  # its tokens
    count: int  # how often it occurs in the documents of the lens
    rarity: float  # −Σ log₂ p over its tokens, with p a token's share of the documents
    # The first places it begins at, ascending global token offsets of the corpus.
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Quote:
    """The text of a verbatim span, and doc_id, title, source, license and position of places."""

    text: str
    start: int  # these as of VerbatimSpan
    length: int
    count: int
    rarity: float
    places: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        return asdict(self)


def quotes(
    ids: Sequence[int], tokens: Sequence[str], start: int, lens: Lens, limit: int
) -> list[Quote]:
    """Return the verbatim spans of a text from a token on; of the same words, the first span."""
    assert lens.suffixes is not None
    distinct: dict[str, VerbatimSpan] = {}
    for span in verbatim_spans(ids, lens.suffixes, start):
        distinct.setdefault("".join(tokens[span.start : span.start + span.length]), span)

    def place(position: int) -> dict[str, Any]:
        facts = lens.cells.facts(int(lens.cells.document_of(np.array([position]))[0]))
        names = ("doc_id", "title", "source", "license")
        return {name: facts[name] for name in names} | {"position": position}

    return [
        Quote(text, *span[:4], tuple(map(place, span.positions)))
        for text, span in list(distinct.items())[:limit]
    ]


def verbatim_spans(
    ids: Sequence[int], suffixes: Suffixes, start: int = 0, *, minimum: int = MIN_SPAN
) -> list[VerbatimSpan]:
    """Return the longest spans of a text that occur in the corpus: by length, rarity and start.

    They have ``minimum`` tokens or more, begin at ``start`` or later, and may overlap; none lies in
    another.
    """
    tokens = np.asarray(ids, dtype=np.int64)

    @cache
    def surprise(token: int) -> float:
        return -math.log2(suffixes.count([token]) / len(suffixes))

    spans: list[VerbatimSpan] = []
    end = start
    for first in range(start, len(tokens)):
        length, count = suffixes.longest_prefix(tokens[first:])
        # Ends never decrease, so a span lies in an earlier one unless it ends later.
        if first + length <= end:
            continue
        end = first + length
        if length >= minimum:
            span = tokens[first:end]
            rarity = math.fsum(map(surprise, span.tolist()))
            places = tuple(suffixes.find(span, SPAN_PLACES).tolist())
            spans.append(VerbatimSpan(first, length, count, rarity, places))
    return sorted(spans, key=lambda span: (-span.length, -span.rarity, span.start))
