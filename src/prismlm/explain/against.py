"""What opposes predictions: near text in which another token came next.

In the sum of the representer theorem (Yeh et al. 2018; docs/concepts.md), a position n with
y_n ≠ y has −p_n(y) z_n·z / λ: the likelier the model held y there, the more it opposes y. So its
weight at a state z is, without the sign,

    w_n = p_n(y) exp((cos(z, z_n) − 1) / T)

over the cells of all prototypes in use at z. A lens stores p_n(y_n) and not p_n(y). Since
p_n(y) ≤ 1 − p_n(y_n), no weight exceeds (1 − p_n(y_n)) exp((cos − 1) / T): the 2,048 positions with
the largest bounds are candidates. For each of them p_n(y) is estimated, by the output layer on the
coded state at the median length of the probe's states; and the passages with the largest estimates
are read by the model, so that the figures shown are the model's own p_n(y). Shares are of the
weight of all candidates, read or estimated.

With int8, the default, estimates are nearly the model's; with pq codes a passage is often missed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from prismlm.corpus.pieces import token_alone
from prismlm.corpus.windows import batch_of, document_windows
from prismlm.errors import InputError
from prismlm.explain.attribution import TEMPERATURE, Attribution, Passage, Places
from prismlm.explain.prediction import Predictions
from prismlm.lens.cells import STRETCH, Where, compared, largest
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.probe import PROBE_FILE, Probe
from prismlm.lens.scan import probabilities, states_of

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.lens.lens import OwnText

# Positions compared in all, shared evenly between predictions and their cells.
MAX_COMPARED = 2**20
CANDIDATES = 2048
# Passages read for each one shown.
READ_RATIO = 1.6
# Few windows are read, so a larger batch would be mostly padding.
TOKENS_PER_BATCH = 1024


class Rivals(NamedTuple):
    """Positions with another next token, by position; [u] each."""

    token: np.ndarray  # the predicted one that each opposes, int64
    place: np.ndarray  # the global position of the state, int64
    cosine: np.ndarray  # of that state to the prediction's, float32
    probability: np.ndarray  # of the predicted token there, float32: estimated, or the model's

    @property
    def weight(self) -> np.ndarray:
        """w_n, float64 [u]."""
        return self.probability * np.exp((self.cosine.astype(np.float64) - 1) / TEMPERATURE)

    def passages(
        self, lm: OpenedModel, lens: Lens, total: float, limit: int, where: Where | None
    ) -> list[Passage]:
        """Return the heaviest passages; shares are of a total weight."""
        weight, first = self.weight, np.flatnonzero(np.diff(self.place, prepend=-1))
        if not len(first):
            return []
        # Of a position that opposes several predictions, the heaviest entry comes last.
        order = np.lexsort((weight, self.place))
        best = order[np.append(first[1:], len(order)) - 1]
        sums = np.add.reduceat(weight, first)
        places = Places(self.place[first], sums, self.cosine[best])
        passages: list[Passage] = []
        for passage in Attribution(lens, places, total - sums.sum()).passages(limit, where):
            rival = best[np.searchsorted(places.place, passage.position - 1)]
            predicted = token_alone(lm.tokenizer, int(self.token[rival]))
            probability = float(self.probability[rival])
            passages.append(replace(passage, predicted=predicted, probability=probability))
        return passages


def opposing_passages(
    predictions: Predictions, lm: OpenedModel, lens: Lens, limit: int, where: Where | None = None
) -> list[Passage]:
    """Return the passages that oppose predictions most, of those with the largest estimates."""
    corpus = lens.text_source
    if corpus is None:
        raise InputError(
            f"what opposes a prediction is read in the corpus {lens.meta.corpus_name}, which is "
            "not where it was, or has changed since it was indexed: say where by --corpus DIR."
        )
    rivals = candidates(predictions, lm, lens)
    estimated, most = float(rivals.weight.sum()), round(READ_RATIO * limit)

    def leading(where: Where | None) -> np.ndarray:
        """Return which candidates are in the passages with the largest estimates."""
        near = np.zeros(len(rivals.place), dtype=bool)
        for passage in rivals.passages(lm, lens, estimated, most, where):
            near |= abs(rivals.place + 1 - passage.position) < passage.length
        return near

    counted = leading(None)
    shown = leading(where) if where else counted
    read, known = counted | shown, rivals.probability.copy()
    known[read] = probabilities_at(lm, lens, corpus, rivals.place[read], rivals.token[read])
    # A filter does not change the total.
    mixed = np.where(counted, known, rivals.probability)
    total = float(rivals._replace(probability=mixed).weight.sum())
    chosen = Rivals(*(column[shown] for column in rivals._replace(probability=known)))
    return chosen.passages(lm, lens, total, limit, where)


@torch.no_grad()
def candidates(predictions: Predictions, lm: OpenedModel, lens: Lens) -> Rivals:
    """Return the positions that may oppose the predictions most, with estimates.

    Of cells with more than a million positions together, evenly spaced ones are compared.
    """
    cells, targets = lens.cells, predictions.targets
    prediction, prototype, _ = predictions.uses(predictions.routing.activations)
    first, last = cells.ranges_except(prototype, targets.numpy()[prediction])
    query = prediction.repeat(2)
    limit = max(STRETCH, MAX_COMPARED // max(1, len(query)))
    nearby = compared(cells, query, first.ravel(), last.ravel(), predictions.states, limit)
    # No probability exceeds what the token that came next left over.
    rest = 1 - nearby.probability.astype(np.float32)
    bound = rest * np.exp((nearby.cosine.astype(np.float64) - 1) / TEMPERATURE)
    chosen = largest(bound, CANDIDATES)
    chosen = chosen[np.argsort(nearby.position[chosen], kind="stable")]
    # The output layer at the coded states, with the length of the lens's states.
    lens.files.check([PROBE_FILE])
    length = Probe.open(lens.path).states.norm(dim=1).median()
    z = length * cells.codes.states(cells.records(nearby.row[chosen]))
    tokens, device = targets[query[nearby.pair[chosen]]], lm.model.device
    half = lens.meta.precision == "bf16"
    estimated = probabilities(lm.model, z.to(device), tokens.to(device), bf16=half).cpu()
    columns = nearby.position[chosen], nearby.cosine[chosen]
    return Rivals(tokens.numpy(), *columns, np.minimum(estimated.numpy(), rest[chosen]))


@torch.no_grad()
def probabilities_at(
    lm: OpenedModel, lens: Lens, corpus: Corpus | OwnText, place: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the probability of a token after each position, as in the index; float32 [n].

    The windows are the index's, each read no further than its last position.
    """
    cells, meta, result = lens.cells, lens.meta, np.zeros(len(place), dtype=np.float32)
    documents = np.unique(cells.document_of(place))
    grid = document_windows(
        documents, cells.starts, cells.lengths, meta.window, meta.stride, corpus.prefix
    )
    window = np.searchsorted(grid.start + grid.skip, place, side="right") - 1
    length = np.zeros(len(grid), dtype=np.int64)
    np.maximum.at(length, window, place - grid.start[window] + 1)
    grid = replace(grid, length=length)
    members = np.argsort(-length, kind="stable")[: np.count_nonzero(length)]
    while len(members):
        width = int(length[members[0]])
        batch, members = np.split(members, [max(1, TOKENS_PER_BATCH // width)])
        inputs = batch_of(grid, corpus, batch, width)
        z = states_of(lm.model, inputs, inputs.owned)
        entries = np.flatnonzero(np.isin(window, batch))
        rows = np.argmax(batch == window[entries, None], axis=1)
        states = z[rows, place[entries] - grid.start[window[entries]]]
        targets = torch.from_numpy(tokens[entries]).to(states.device)
        result[entries] = probabilities(lm.model, states, targets).cpu().numpy()
    return result
