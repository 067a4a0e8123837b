"""What opposes predictions: near text in which another token came next.

Of the representer theorem's sum (:mod:`prismlm.explain.positions`), a position n with y_n ≠ y has
−p_n(y) z_n·z / λ: the likelier the model held y there, the more it opposes y. So its weight at a
state z is, without the sign,

    w_n = p_n(y) exp((cos(z, z_n) − 1) / T)

over the cells of all prototypes in use at z. A lens keeps p_n(y_n) and not p_n(y). Since
p_n(y) ≤ 1 − p_n(y_n), no weight exceeds (1 − p_n(y_n)) exp((cos − 1) / T): the 2,048 positions with
the largest of these bounds are candidates. For each of them p_n(y) is estimated, by the output
layer on the coded state at the median length of the probe's states; and the passages with the
largest estimates are read again by the model, so that what is shown is p_n(y) as the model has it.

How much that misses is up to the codes. Those of the demo are its smallest, pq12, and leave states
a cosine of 0.94 to what they were. There, for one prediction of each of twelve answers, eight
passages that are read again hold 1.5 of the five weightiest candidates, and the five that are shown
63 % of the weight of those; the 64 largest bounds, read again, hold 1.8 and 62 %, for 5.6 times as
many tokens. With int8, the default, estimates are nearly the model's.
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
from prismlm.explain.attribution import Attribution, Passage, Places
from prismlm.explain.positions import TEMPERATURE
from prismlm.explain.prediction import Predictions
from prismlm.lens.cells import STRETCH, compared, largest
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.probe import Probe
from prismlm.lens.states import probabilities
from prismlm.lens.where import Where
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.lens.text import OwnText

# Positions looked at in all, shared evenly between predictions and their cells.
LOOKED_AT = 2**20
CANDIDATES = 2048
# Passages read again for each one that is shown.
READ = 1.6
# Few windows are read, so that a larger batch would be mostly padding.
TOKENS_PER_BATCH = 1024


class Rivals(NamedTuple):
    """Positions with another next token, in the order of places; [u] each.

    Attributes:
        prediction: which one each opposes, int64.
        place: the global position of the state, int64.
        cosine: of that state to the prediction's, float32.
        bound: what its weight cannot exceed, float64.
        probability: of the predicted token there, float32: estimated, or the model's.
    """

    prediction: np.ndarray
    place: np.ndarray
    cosine: np.ndarray
    bound: np.ndarray
    probability: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """w_n, float64 [u]."""
        return self.probability * np.exp((self.cosine.astype(np.float64) - 1) / TEMPERATURE)


class Opposition:
    """What opposes predictions; see the module for the equation.

    Shares are of the weight of all candidates, read again or else estimated, and are independent of
    those of what supports the predictions.

    Args:
        predictions: that are opposed.
        lm: the model, which reads text again.
        lens: of the model.

    Raises:
        InputError: its text is not at hand.
    """

    def __init__(self, predictions: Predictions, lm: OpenedModel, lens: Lens) -> None:
        self.lm, self.lens, self.tokens = lm, lens, predictions.targets.numpy()
        self.rivals = candidates(predictions, lm, lens)
        # What the model gave where it was read again.
        self.known = np.full(len(self.rivals.place), np.nan, dtype=np.float32)
        self.window = _windows_of(self.rivals.place, lens, readable(lens).prefix)[1]

    def estimated(self, limit: int, where: Where | None = None) -> list[Passage]:
        """Return passages by their estimates alone, without a forward pass."""
        return self._passages(self.rivals, float(self.rivals.weight.sum()), limit, where)

    def passages(self, limit: int, where: Where | None = None) -> list[Passage]:
        """Return passages, the weightiest of those that were read again.

        More are read than are shown, by their estimates, and with them every candidate that comes
        before one of them in its window.
        """
        chosen = self._chosen(limit, where)
        # A filter changes no share, so these are of the same weight with it and without.
        counted = chosen if where is None else self._chosen(limit, None)
        new = np.flatnonzero((chosen | counted) & np.isnan(self.known))
        tokens = self.tokens[self.rivals.prediction[new]]
        self.known[new] = probabilities_at(self.lm, self.lens, self.rivals.place[new], tokens)
        estimates = self.rivals.probability
        mixed = self.rivals._replace(probability=np.where(counted, self.known, estimates))
        read = self.rivals._replace(probability=self.known)
        some = Rivals(*(column[chosen] for column in read))
        return self._passages(some, float(mixed.weight.sum()), limit, where)

    def _chosen(self, limit: int, where: Where | None) -> np.ndarray:
        """Return which candidates are read, by estimates alone: not by what was asked before."""
        place = self.rivals.place
        wanted = np.zeros(len(place), dtype=bool)
        for passage in self.estimated(round(READ * limit), where):
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
        # Of a place that opposes several predictions, the weightiest comes last.
        order = np.lexsort((weight, rivals.place))
        best = order[np.append(first[1:], len(order)) - 1]
        sums = np.add.reduceat(weight, first)
        places = Places(rivals.place[first], sums, rivals.cosine[best])
        found = Attribution(self.lens, places, total - float(sums.sum())).passages(limit, where)
        passages: list[Passage] = []
        for passage in found:
            rival = best[np.searchsorted(places.place, passage.position - 1)]
            token = int(self.tokens[rivals.prediction[rival]])
            words = token_alone(self.lm.tokenizer, token)
            probability = float(rivals.probability[rival])
            how = {"predicted": words, "probability": probability, "for_or_against": "against"}
            passages.append(replace(passage, **how))
        return passages


def readable(lens: Lens) -> Corpus | OwnText:
    """Return the text that is read again, where it is by now."""
    if lens.text_source is None:
        raise InputError(
            "what speaks against a prediction is read again in the corpus "
            f"{lens.meta.corpus_name}, which is not where it was, or has changed since it was "
            "indexed, and the lens does not hold its text. Say with --corpus DIR where it is, or "
            "build the lens again with `prismlm index MODEL --corpus DIR --positions 1 "
            "--overwrite`."
        )
    return lens.text_source


@torch.no_grad()
def candidates(predictions: Predictions, lm: OpenedModel, lens: Lens) -> Rivals:
    """Return the positions that may oppose the predictions most, with estimates.

    Of cells with more than a million positions together, evenly spaced ones are looked at.
    """
    uses, cells, targets = predictions.uses("source"), lens.cells, predictions.targets
    first, last = cells.ranges_except(uses.prototype, targets.numpy()[uses.prediction])
    query = uses.prediction.repeat(2)
    most = max(STRETCH, LOOKED_AT // max(1, len(query)))
    found = compared(cells, query, first.ravel(), last.ravel(), predictions.states, most)
    kernel = np.exp((found.cosine.astype(np.float64) - 1) / TEMPERATURE)
    bound = (1 - found.probability.astype(np.float64)) * kernel
    chosen = largest(bound, CANDIDATES)
    chosen = chosen[np.argsort(found.position[chosen], kind="stable")]
    prediction = query[found.pair[chosen]]
    # The output layer at the coded states, at the length that states of the lens have.
    length = Probe.open(lens.path).states.norm(dim=1).median()
    z = length * cells.codes.states(cells.records(found.row[chosen]))
    tokens = targets[prediction].to(lm.model.device)
    half = lens.meta.precision == "bf16"
    estimated = probabilities(lm.model, z.to(tokens.device), tokens, bf16=half).cpu()
    # No probability is above what the token that did come next left over.
    rest = 1 - found.probability[chosen].astype(np.float32)
    columns = found.position[chosen], found.cosine[chosen], bound[chosen]
    return Rivals(prediction, *columns, np.minimum(estimated.numpy(), rest))


@torch.no_grad()
def probabilities_at(
    lm: OpenedModel, lens: Lens, place: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the probability of a token after each place, as the model gave it for the index.

    The windows are the index's, each read no further than its last place. Places and tokens are
    int64 [n], the result float32 [n].
    """
    corpus, device = readable(lens), lm.model.device
    found = np.zeros(len(place), dtype=np.float32)
    grid, window = _windows_of(place, lens, corpus.prefix)
    members = np.argsort(-grid.length, kind="stable")
    while len(members):
        width = int(grid.length[members[0]])
        batch, members = np.split(members, [max(1, TOKENS_PER_BATCH // width)])
        read = batch_of(grid, corpus, batch, width, corpus.eos_token_id)
        row_of = np.full(len(grid), -1)
        row_of[batch] = np.arange(len(batch))
        asked = np.flatnonzero(row_of[window] >= 0)
        rows = row_of[window[asked]]
        columns = place[asked] - grid.start[window[asked]]
        ids, attended = read.input_ids.to(device), read.attention_mask.long().to(device)
        with capture(lm.model, logits=False) as seen:
            lm.model(input_ids=ids, attention_mask=attended, use_cache=False)
        wanted = torch.from_numpy(tokens[asked]).to(device)
        found[asked] = probabilities(lm.model, seen.z[rows, columns], wanted).cpu().numpy()
    return found


def _windows_of(
    place: np.ndarray, lens: Lens, prefix: Sequence[int]
) -> tuple[WindowGrid, np.ndarray]:
    """Return the index's windows that own some places, cut after those, and each place's window."""
    cells = lens.cells
    documents, lengths = np.unique(cells.document_of(place)), cells.documents["length"].to_numpy()
    how = lens.meta.window, lens.meta.stride, prefix
    grid = document_windows(documents, cells.starts, lengths, *how)
    owner = np.searchsorted(grid.start + grid.skip, place, side="right") - 1
    used, window = np.unique(owner, return_inverse=True)
    length = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(length, window, place - grid.start[used][window] + 1)
    columns = {name: getattr(grid, name)[used] for name in ("document", "start", "skip")}
    return replace(grid, length=length, **columns), window
