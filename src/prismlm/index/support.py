"""How near the corpus comes to text of its own kind that it does not hold: the scale of support.

For a prediction of y at a state z, the nearest position is the one with the largest cosine among
those of the active cells whose next token is y. For stretches of the corpus's other split, read by
themselves, that is what text of the same kind finds which the lens does not have; where there is no
such split, for stretches of its own documents with each left out. F is the percentile of a nearest
cosine among theirs, and m how many tokens from the predicted one on, of the answer and up to 16,
stand together in the corpus. An answer is near

    as a whole      where mean F + ln mean m is large, over its tokens,
    at some places  where the mean of F¹⁶ is: a few tokens nearer than nearly all of unseen text.

Text that stands in the corpus is near as a whole; text that tells in its own words what stands
there is near at some places. The corpus holds nothing like an answer whose mean F + ln mean m is
small, or whose mean m is: states take strings of letters for others of their kind, however near.
Words alone tell less of text of other domains. What each is worth by itself stands in
docs/results/support.md. A lens without a suffix array has mean F alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prismlm.index.cells import Cells
from prismlm.index.neighbours import nearest_of, neighbours
from prismlm.layers import PrototypeHead
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.index.suffixes import Suffixes

DOCUMENTS, RUN = 160, 32
READ_TOGETHER = 8
FEWEST_DOCUMENTS = 40
LENGTHS = (1, 2, 4, 8, 16, 32)
FEWEST_ANSWERS = 20
LONGEST_MATCH = 16
POWER = 16
# Of unseen text, this share is called strong by either mean; none by the first, and by m alone.
SHARE_STRONG, SHARE_NONE, SHARE_FEW_WORDS = 0.025, 0.05, 0.02
PERCENTILES = 101


@dataclass(frozen=True)
class SupportScale:
    """What unseen text of the corpus has.

    Raises:
        TypeError: lists of lengths that do not belong together, as a damaged file has them.

    Attributes:
        nearest: percentiles 0 to 100 of the nearest cosine of single predictions.
        lengths: of answers, in tokens.
        low: for each length, the score of an answer that 5 % of answers lie below.
        high: and the one that 2.5 % lie above.
        high_places: the same of the mean of F¹⁶.
        predictions: how many it was measured on.
        words: whether the score counts m; False where the lens cannot tell.
        low_words: the mean m that 2 % lie below; None where m is not known.
    """

    nearest: list[float]
    lengths: list[int]
    low: list[float]
    high: list[float]
    high_places: list[float]
    predictions: int
    words: bool = False
    low_words: list[float] | None = None

    def __post_init__(self) -> None:
        words = self.low if self.low_words is None else self.low_words
        columns = self.low, self.high, self.high_places, words
        if not self.nearest or any(len(column) != len(self.lengths) for column in columns):
            raise TypeError("its lists do not belong together")

    def score(self, nearest: np.ndarray) -> np.ndarray:
        """Return F: the share of unseen predictions with a smaller nearest cosine, in [0, 1]."""
        place = np.searchsorted(np.array(self.nearest), nearest, side="right")
        return np.clip((place - 0.5) / len(self.nearest), 0, 1)

    def bounds(self, length: int) -> Bounds:
        """Return the bounds for a length, between those that were measured."""
        at, where = np.log(self.lengths), np.log(max(1, length))
        # Nothing lies below a mean m of 0.
        words = [0.0] * len(at) if self.low_words is None else self.low_words
        columns = (self.low, self.high, self.high_places, words)
        return Bounds(*(float(np.interp(where, at, column)) for column in columns))


class Bounds(NamedTuple):
    """Of a scale, for answers of one length; :class:`SupportScale` says what each is."""

    low: float
    high: float
    high_places: float
    low_words: float


def answer_score(scores: np.ndarray, matched: np.ndarray | None) -> float:
    """Return mean F + ln mean m of an answer, or mean F: see the module.

    Args:
        scores: F of each token, [n].
        matched: m of each token, int [n]; a token that stands nowhere counts as 1, since F tells
            that. None: m is not known.
    """
    score = float(scores.mean())
    return score if matched is None else score + float(np.log(np.maximum(matched, 1).mean()))


def matched_words(
    suffixes: Suffixes, tokens: np.ndarray, outside: tuple[int, int] | None = None
) -> np.ndarray:
    """Return how many tokens from each on stand together in the corpus, at most 16: int64 [n].

    Args:
        suffixes: of the lens.
        tokens: one after the other, [n].
        outside: what stands at these global positions, the first and one beyond the last, does
            not count.
    """
    found = np.zeros(len(tokens), dtype=np.int64)
    for place in range(len(tokens)):
        ahead = tokens[place : place + LONGEST_MATCH]
        if outside is None:
            found[place] = suffixes.longest_prefix(ahead)[0]
        else:
            found[place] = suffixes.longest_elsewhere(ahead, *outside)
    return found


def measure_support(
    cells: Cells,
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    split: Split,
    suffixes: Suffixes | None = None,
) -> SupportScale | None:
    """Measure the scale on stretches of 32 predictions of 160 documents that the cells lack.

    Args:
        cells: of the lens.
        model: the model.
        head: its prototype head.
        corpus: that the cells are of.
        split: which documents of it.
        suffixes: of the lens; None where it has none.

    Returns:
        The scale, or None where there is too little text to measure it.
    """
    stretches = calibration_stretches(corpus, split)
    found: list[np.ndarray] = []
    for first in range(0, len(stretches), READ_TOGETHER):
        part = stretches[first : first + READ_TOGETHER]
        found += leave_one_out(cells, model, head, corpus, part)
    if not found:
        return None
    nearest = np.concatenate(found)
    grid = np.quantile(nearest, np.linspace(0, 1, PERCENTILES)).tolist()
    scale = SupportScale(grid, [], [], [], [], len(nearest))
    scores = [scale.score(part) for part in found]
    matched: list[np.ndarray | None] = [None] * len(stretches)
    if suffixes is not None:
        matched = [_matched_elsewhere(suffixes, corpus, *stretch) for stretch in stretches]
    found_bounds: dict[int, Bounds] = {}
    for length in LENGTHS:
        answers = [
            answer
            for own, words in zip(scores, matched, strict=True)
            for answer in _answers(own, words, length)
        ]
        if len(answers) < FEWEST_ANSWERS:
            break
        found_bounds[length] = _bounds(np.array(answers))
    if not found_bounds:
        return None
    low, high, places, low_words = (
        list(column) for column in zip(*found_bounds.values(), strict=True)
    )
    words = None if suffixes is None else low_words
    lengths, count = list(found_bounds), len(nearest)
    return SupportScale(grid, lengths, low, high, places, count, suffixes is not None, words)


def _bounds(answers: np.ndarray) -> Bounds:
    """Return what a share of answers, of score, mean F¹⁶ and mean m each, lies beyond."""
    score, places, words = answers.T
    return Bounds(
        float(np.quantile(score, SHARE_NONE)),
        float(np.quantile(score, 1 - SHARE_STRONG)),
        float(np.quantile(places, 1 - SHARE_STRONG)),
        float(np.quantile(words, SHARE_FEW_WORDS)),
    )


def unseen_documents(corpus: Corpus, split: Split) -> np.ndarray:
    """Return the documents of the other split, or, where they are too few, those of this one."""
    others = np.setdiff1d(corpus.split("all"), corpus.split(split))
    others = others[corpus.lengths[others] > 2]
    return others if len(others) >= FEWEST_DOCUMENTS else corpus.split(split)


def calibration_stretches(corpus: Corpus, split: Split) -> list[tuple[int, int]]:
    """Return where stretches of unseen documents start, and their tokens; one a document."""
    generator = np.random.default_rng(0)
    known = unseen_documents(corpus, split)
    # Without what stands before a text and after it.
    before = len(corpus.prefix)
    lengths = corpus.lengths[known] - 1 - before
    usable = np.flatnonzero(lengths > 1)
    if not len(usable):
        return []
    chosen = np.sort(generator.choice(usable, min(DOCUMENTS, len(usable)), replace=False))
    room = np.maximum(1, lengths[chosen] - RUN)
    offset = before + (generator.random(len(chosen)) * room).astype(np.int64)
    start = corpus.starts[known[chosen]] + offset
    return list(zip(start.tolist(), np.minimum(RUN + 1, lengths[chosen]).tolist(), strict=True))


@torch.no_grad()
def leave_one_out(
    cells: Cells,
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    stretches: Sequence[tuple[int, int]],
) -> list[np.ndarray]:
    """Return the nearest cosine of each prediction of stretches among those of other documents.

    Args:
        stretches: global position of the first token, and tokens, all of one document; each but
            the first is predicted.

    Returns:
        float32 [tokens − 1] of each stretch.
    """
    counts = np.array([length - 1 for _, length in stretches])
    before = len(corpus.prefix)
    # Each is read as a text of its own.
    rows = ([*corpus.prefix, *corpus.read_tokens(*stretch).tolist()] for stretch in stretches)
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    with capture(model, logits=False) as seen:
        # What is padded comes after all that is looked at, so that no mask is needed.
        model(input_ids=ids.to(model.device), use_cache=False)
    predicts = torch.arange(ids.shape[1] - 1 - before) < torch.from_numpy(counts)[:, None]
    z = seen.z[:, before:-1].float().cpu()[predicts]
    states, tokens = z * inverse_norms(z), ids[:, before + 1 :][predicts].numpy()
    query, cell = active_cells(head, weight_of(model), states, tokens)
    found = neighbours(cells, query, cell, tokens[query], states)
    owner = query[found.pair]
    starts = [int(corpus.starts[corpus.document_at(start)]) for start, _ in stretches]
    own = np.repeat(starts, counts)[owner]
    others = cells.starts[cells.document_of(found.place)] != own
    nearest = nearest_of(found.cosine[others], owner[others], len(tokens))
    return np.split(nearest, np.cumsum(counts)[:-1])


@torch.no_grad()
def active_cells(
    head: PrototypeHead, weight: Tensor, states: Tensor, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prototypes in use at each state that speak for a token: (state, prototype)."""
    found = head.nearest(states.to(head.prototypes.device))
    signature = (weight[torch.from_numpy(tokens)].float() - weight.float().mean(0)).to(
        head.prototypes.device
    )
    speaks = torch.einsum("nkd,nd->nk", head.prototypes.float()[found.indices], signature)
    query, slot = ((found.activations > 0) & (speaks > 0)).nonzero(as_tuple=True)
    return query.cpu().numpy(), found.indices[query, slot].cpu().numpy()


def _matched_elsewhere(suffixes: Suffixes, corpus: Corpus, start: int, length: int) -> np.ndarray:
    """Return m of each prediction of a stretch, what stands in its own document left out."""
    number = corpus.document_at(start)
    first = int(corpus.starts[number])
    own = first, first + int(corpus.lengths[number])
    return matched_words(suffixes, corpus.read_tokens(start, length)[1:].astype(np.int64), own)


def _answers(
    scores: np.ndarray, matched: np.ndarray | None, length: int
) -> Iterator[tuple[float, float, float]]:
    """Yield score, mean F¹⁶ and mean m of the successive answers of one length of a stretch."""
    for first in range(0, len(scores) // length * length, length):
        own = scores[first : first + length]
        words = None
        if matched is not None:
            # What goes on beyond the answer does not count for it.
            words = np.minimum(matched[first : first + length], np.arange(length, 0, -1))
        mean = 0.0 if words is None else float(words.mean())
        yield answer_score(own, words), float((own**POWER).mean()), mean
