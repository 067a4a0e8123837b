"""What opposes predictions: near text in which another token came next.

In the sum of the representer theorem (:mod:`prismlm.explain.attribution`), a position n with
y_n ≠ y has −p_n(y) z_n·z / λ: the likelier the model held y there, the more it opposes y. So its
weight at a state z is, without the sign,

    w_n = p_n(y) exp((cos(z, z_n) − 1) / T)

over the cells of all prototypes in use at z. A lens stores p_n(y_n) and not p_n(y). Since
p_n(y) ≤ 1 − p_n(y_n), no weight exceeds (1 − p_n(y_n)) exp((cos − 1) / T): the 2,048 positions with
the largest bounds are candidates. For each of them p_n(y) is estimated, by the output layer on the
coded state at the median length of the probe's states; and the passages with the largest estimates
are read by the model, so that the figures shown are the model's own p_n(y).

The error depends on the codes. Those of the demo are its smallest, pq12, with a cosine of 0.94 to
the true states. There, for one prediction of each of twelve answers, the eight passages read hold
1.5 of the five heaviest candidates, and the five shown 63 % of the weight of those; reading the 64
largest bounds gives 1.8 and 62 %, for 5.6 times as many tokens. With int8, the default, estimates
are nearly the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from prismlm.corpus.pieces import token_alone
from prismlm.corpus.windows import WindowGrid, batch_of, document_windows
from prismlm.errors import InputError
from prismlm.explain.attribution import TEMPERATURE, Attribution, Passage, Places
from prismlm.explain.prediction import Predictions
from prismlm.lens.cells import STRETCH, Where, compared, largest
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.probe import PROBE_FILE, Probe
from prismlm.lens.states import probabilities
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.lens.text import OwnText

# Positions compared in all, shared evenly between predictions and their cells.
MAX_COMPARED = 2**20
CANDIDATES = 2048
# Passages read for each one shown.
READ_RATIO = 1.6
# Few windows are read, so a larger batch would be mostly padding.
TOKENS_PER_BATCH = 1024


class Rivals(NamedTuple):
    """Positions with another next token, by position; [u] each."""

    prediction: np.ndarray  # which one each opposes, int64
    place: np.ndarray  # the global position of the state, int64
    cosine: np.ndarray  # of that state to the prediction's, float32
    bound: np.ndarray  # an upper bound of its weight, float64
    probability: np.ndarray  # of the predicted token there, float32: estimated, or the model's

    @property
    def weight(self) -> np.ndarray:
        """w_n, float64 [u]."""
        return self.probability * np.exp((self.cosine.astype(np.float64) - 1) / TEMPERATURE)


class Opposition:
    """What opposes predictions; shares are of the weight of all candidates, read or estimated."""

    def __init__(self, predictions: Predictions, lm: OpenedModel, lens: Lens) -> None:
        self.lm, self.lens, self.tokens = lm, lens, predictions.targets.numpy()
        self.rivals = candidates(predictions, lm, lens)
        # The model's probabilities at candidates that it has read.
        self.known = np.full(len(self.rivals.place), np.nan, dtype=np.float32)
        self.window = _windows_of(self.rivals.place, lens, readable_text(lens).prefix)[1]

    def estimated(self, limit: int, where: Where | None = None) -> list[Passage]:
        """Return passages by their estimates alone, without a forward pass."""
        return self._passages(self.rivals, float(self.rivals.weight.sum()), limit, where)

    def passages(self, limit: int, where: Where | None = None) -> list[Passage]:
        """Return the heaviest of the passages that are read: those with the largest estimates.

        More are read than shown, with all candidates before them in their windows.
        """
        chosen = self._chosen(limit, where)
        # Read without the filter too, so that it does not change the total.
        counted = chosen if where is None else self._chosen(limit, None)
        new = np.flatnonzero((chosen | counted) & np.isnan(self.known))
        tokens = self.tokens[self.rivals.prediction[new]]
        self.known[new] = probabilities_at(self.lm, self.lens, self.rivals.place[new], tokens)
        mixed = np.where(counted, self.known, self.rivals.probability)
        total = float(self.rivals._replace(probability=mixed).weight.sum())
        known = self.rivals._replace(probability=self.known)
        return self._passages(Rivals(*(column[chosen] for column in known)), total, limit, where)

    def _chosen(self, limit: int, where: Where | None) -> np.ndarray:
        """Return which candidates are read, bool [u]; it does not depend on earlier calls."""
        place = self.rivals.place
        wanted = np.zeros(len(place), dtype=bool)
        for passage in self.estimated(round(READ_RATIO * limit), where):
            wanted |= abs(place + 1 - passage.position) < passage.length
        last = np.full(len(place), -1)
        np.maximum.at(last, self.window[wanted], place[wanted])
        return wanted | (place <= last[self.window])

    def _passages(
        self, rivals: Rivals, total: float, limit: int, where: Where | None
    ) -> list[Passage]:
        weight, first = rivals.weight, np.flatnonzero(np.diff(rivals.place, prepend=-1))
        if not len(first):
            return []
        # Of a position that opposes several predictions, the heaviest entry comes last.
        order = np.lexsort((weight, rivals.place))
        best = order[np.append(first[1:], len(order)) - 1]
        sums = np.add.reduceat(weight, first)
        places = Places(rivals.place[first], sums, rivals.cosine[best])
        attribution = Attribution(self.lens, places, total - float(sums.sum()))
        passages: list[Passage] = []
        for passage in attribution.passages(limit, where):
            rival = best[np.searchsorted(places.place, passage.position - 1)]
            token = int(self.tokens[rivals.prediction[rival]])
            opposing = replace(
                passage,
                for_or_against="against",
                predicted=token_alone(self.lm.tokenizer, token),
                probability=float(rivals.probability[rival]),
            )
            passages.append(opposing)
        return passages


def readable_text(lens: Lens) -> Corpus | OwnText:
    """Return the text that the model reads, from the corpus or the lens."""
    if lens.text_source is None:
        raise InputError(
            "what opposes a prediction is read in the corpus "
            f"{lens.meta.corpus_name}, which is not where it was, or has changed since it was "
            "indexed, and the lens does not hold its text. Say with --corpus DIR where it is, or "
            "build the lens again with `prismlm index MODEL --corpus DIR --overwrite`."
        )
    return lens.text_source


@torch.no_grad()
def candidates(predictions: Predictions, lm: OpenedModel, lens: Lens) -> Rivals:
    """Return the positions that may oppose the predictions most, with estimates.

    Of cells with more than a million positions together, evenly spaced ones are compared.
    """
    uses, cells, targets = predictions.uses("source"), lens.cells, predictions.targets
    first, last = cells.ranges_except(uses.prototype, targets.numpy()[uses.prediction])
    query = uses.prediction.repeat(2)
    limit = max(STRETCH, MAX_COMPARED // max(1, len(query)))
    nearby = compared(cells, query, first.ravel(), last.ravel(), predictions.states, limit)
    kernel = np.exp((nearby.cosine.astype(np.float64) - 1) / TEMPERATURE)
    bound = (1 - nearby.probability.astype(np.float64)) * kernel
    chosen = largest(bound, CANDIDATES)
    chosen = chosen[np.argsort(nearby.position[chosen], kind="stable")]
    prediction = query[nearby.pair[chosen]]
    # The output layer at the coded states, with the length of the lens's states.
    lens.files.check(lens.meta, [PROBE_FILE])
    length = Probe.open(lens.path).states.norm(dim=1).median()
    z = length * cells.codes.states(cells.records(nearby.row[chosen]))
    tokens = targets[prediction].to(lm.model.device)
    half = lens.meta.precision == "bf16"
    estimated = probabilities(lm.model, z.to(tokens.device), tokens, bf16=half).cpu()
    # No probability exceeds what the token that came next left over.
    rest = 1 - nearby.probability[chosen].astype(np.float32)
    columns = nearby.position[chosen], nearby.cosine[chosen], bound[chosen]
    return Rivals(prediction, *columns, np.minimum(estimated.numpy(), rest))


@torch.no_grad()
def probabilities_at(
    lm: OpenedModel, lens: Lens, place: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the probability of a token after each position, as in the index; float32 [n].

    The windows are the index's, each read no further than its last position.
    """
    corpus, device = readable_text(lens), lm.model.device
    result = np.zeros(len(place), dtype=np.float32)
    grid, window = _windows_of(place, lens, corpus.prefix)
    members = np.argsort(-grid.length, kind="stable")
    while len(members):
        width = int(grid.length[members[0]])
        batch, members = np.split(members, [max(1, TOKENS_PER_BATCH // width)])
        inputs = batch_of(grid, corpus, batch, width, corpus.eos_token_id)
        row_of = np.full(len(grid), -1)
        row_of[batch] = np.arange(len(batch))
        entries = np.flatnonzero(row_of[window] >= 0)
        rows = row_of[window[entries]]
        columns = place[entries] - grid.start[window[entries]]
        ids, attended = inputs.input_ids.to(device), inputs.attention_mask.long().to(device)
        with capture(lm.model, logits=False) as seen:
            lm.model(input_ids=ids, attention_mask=attended, use_cache=False)
        targets = torch.from_numpy(tokens[entries]).to(device)
        result[entries] = probabilities(lm.model, seen.z[rows, columns], targets).cpu().numpy()
    return result


def _windows_of(
    place: np.ndarray, lens: Lens, prefix: Sequence[int]
) -> tuple[WindowGrid, np.ndarray]:
    """Return the index's windows that own some positions, cut after them, and each one's window."""
    cells = lens.cells
    documents, sizes = np.unique(cells.document_of(place)), (lens.meta.window, lens.meta.stride)
    grid = document_windows(documents, cells.starts, cells.lengths, *sizes, prefix)
    owner = np.searchsorted(grid.start + grid.skip, place, side="right") - 1
    used, window = np.unique(owner, return_inverse=True)
    length = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(length, window, place - grid.start[used][window] + 1)
    columns = {name: getattr(grid, name)[used] for name in ("document", "start", "skip")}
    return replace(grid, length=length, **columns), window
