"""What speaks against predictions: near text in which another token came next.

Of the representer theorem's sum (:mod:`prismlm.explain.positions`), a position n with y_n ≠ y has
−p_n(y) z_n·z / λ: the more it speaks against y, the likelier the model held y there. So its weight
at a state z is, without the sign,

    w_n = p_n(y) exp((cos(z, z_n) − 1) / T)

Looked at are the cells of all prototypes in use at z, whatever they say of y. An index keeps
p_n(y_n) and not p_n(y), so the model reads the text of a shortlist again. Since
p_n(y) ≤ 1 − p_n(y_n), no weight exceeds (1 − p_n(y_n)) exp((cos − 1) / T): the shortlist has the
64 largest of these bounds for each prediction, and the 128 largest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from prismlm.corpus.pieces import token_alone
from prismlm.corpus.windows import WindowGrid, batch_of, document_windows
from prismlm.errors import InputError
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.passages import Places, PositionAttribution
from prismlm.explain.positions import TEMPERATURE
from prismlm.index.cells import Cells
from prismlm.index.lens import Lens
from prismlm.index.neighbours import STRETCH, compared, nearest_of
from prismlm.index.positions import probabilities
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.index.opened_model import OpenedModel

# Positions looked at in all, shared evenly between predictions and their cells.
LOOKED_AT = 2**20
SHORTLIST = 64
MOST_READ = 128
TOKENS_PER_BATCH = 4096


class Rivals(NamedTuple):
    """A shortlist of positions with another next token, in the order of predictions.

    Attributes:
        prediction: which one, int64 [u].
        place: the global position of the state, int64 [u].
        cosine: of that state to the prediction's, float32 [u].
        bound: what its weight cannot exceed, float64 [u].
    """

    prediction: np.ndarray
    place: np.ndarray
    cosine: np.ndarray
    bound: np.ndarray


@dataclass(frozen=True, kw_only=True)
class OppositionAttribution(PositionAttribution):
    """What speaks against predictions, by the positions of the corpus that do.

    Shares are of the whole shortlist's weight, and have nothing to do with those of what speaks
    for them.

    Attributes:
        lm: the model, which knows the words of its tokens.
        predicted: the predicted token that each place speaks most against, int64 [n].
        probability: the model's, of that token there, float32 [n].
    """

    lm: OpenedModel
    predicted: np.ndarray
    probability: np.ndarray

    def marked(self, index: int) -> dict[str, Any]:
        """Return what a passage says of its weightiest place."""
        token = token_alone(self.lm.tokenizer, int(self.predicted[index]))
        return {
            "for_or_against": "against",
            "predicted": token,
            "probability": float(self.probability[index]),
        }


def against(table: EvidenceTable, lm: OpenedModel, lens: Lens) -> OppositionAttribution:
    """Gather what speaks against predictions; see the module for the equation.

    Args:
        table: of the predictions, with activations.
        lm: the model, which reads the shortlist's text again.
        lens: of the model, with cells and its corpus.

    Raises:
        InputError: the lens has no cells, or its corpus is not at hand.
        FormatError: a file is damaged.
    """
    cells = lens.cells
    if cells is None or lens.corpus is None:
        raise InputError(
            f"what speaks against a prediction is read again in the corpus {lens.meta.corpus_name},"
            " which is not where it was, or has changed since it was indexed. Build the lens again "
            "with `prismlm index MODEL --corpus DIR --positions 1 --overwrite`."
        )
    found = shortlist(table, cells)
    tokens = table.targets.numpy()[found.prediction]
    probability = probabilities_at(lm, lens, cells, lens.corpus, found.place, tokens)
    cosine = found.cosine.astype(np.float64)
    weight = probability * np.exp((cosine - 1) / TEMPERATURE)
    # Of a place that speaks against several predictions, the weightiest comes last.
    order = np.lexsort((weight, found.place))
    place, first = np.unique(found.place[order], return_index=True)
    best = order[np.append(first[1:], len(order)) - 1] if len(order) else order
    return OppositionAttribution(
        lens,
        cells,
        Places(
            place,
            np.add.reduceat(weight[order], first) if len(order) else weight,
            found.cosine[best],
        ),
        unplaced=0.0,
        beside=0.0,
        nearest=nearest_of(found.cosine, found.prediction, len(table.states)),
        tokens=table.targets.numpy(),
        lm=lm,
        predicted=tokens[best],
        probability=probability[best],
    )


def shortlist(table: EvidenceTable, cells: Cells) -> Rivals:
    """Return the positions that may speak most against each prediction.

    Of cells with more than a million positions together, evenly spaced ones are looked at.

    Raises:
        InputError: the table has no activations.
        FormatError: a file is damaged.
    """
    uses = table.uses("source")
    first, last = cells.beside(uses.prototype, table.targets.numpy()[uses.position])
    query = uses.position.repeat(2)
    most = max(STRETCH, LOOKED_AT // max(1, len(query)))
    found = compared(cells, query, first.ravel(), last.ravel(), table.states, most)
    prediction = query[found.pair]
    kernel = np.exp((found.cosine.astype(np.float64) - 1) / TEMPERATURE)
    bound = (1 - found.probability.astype(np.float64)) * kernel
    order = np.lexsort((-bound, prediction))
    rank = np.arange(len(order)) - np.searchsorted(prediction[order], prediction[order])
    chosen = order[rank < SHORTLIST]
    chosen = chosen[np.argsort(-bound[chosen], kind="stable")[:MOST_READ]]
    chosen = chosen[np.argsort(prediction[chosen], kind="stable")]
    return Rivals(prediction[chosen], found.place[chosen], found.cosine[chosen], bound[chosen])


@torch.no_grad()
def probabilities_at(
    lm: OpenedModel,
    lens: Lens,
    cells: Cells,
    corpus: Corpus,
    place: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """Return the probability of a token after each place, as the model gave it for the index.

    The windows are the index's, each read no further than its last place.

    Args:
        place: global positions, int64 [n].
        tokens: int64 [n].

    Returns:
        float32 [n].
    """
    found = np.zeros(len(place), dtype=np.float32)
    grid, window = _windows_of(place, lens, cells, corpus.prefix)
    members = np.argsort(-grid.length, kind="stable")
    while len(members):
        width = int(grid.length[members[0]])
        batch, members = np.split(members, [max(1, TOKENS_PER_BATCH // width)])
        read = batch_of(grid, corpus, batch, (len(batch), width), corpus.eos_token_id)
        row_of = np.full(len(grid), -1)
        row_of[batch] = np.arange(len(batch))
        asked = np.flatnonzero(row_of[window] >= 0)
        rows = row_of[window[asked]]
        columns = place[asked] - grid.start[window[asked]]
        ids, attended = read.input_ids.to(lm.model.device), read.attention_mask.long()
        with capture(lm.model, logits=False) as seen:
            lm.model(input_ids=ids, attention_mask=attended.to(ids.device), use_cache=False)
        wanted = torch.from_numpy(tokens[asked]).to(ids.device)
        found[asked] = probabilities(lm.model, seen.z[rows, columns], wanted).cpu().numpy()
    return found


def _windows_of(
    place: np.ndarray, lens: Lens, cells: Cells, prefix: Sequence[int]
) -> tuple[WindowGrid, np.ndarray]:
    """Return the index's windows that own some places, cut after those, and each place's window."""
    grid = document_windows(
        np.unique(cells.document_of(place)),
        cells.starts,
        cells.documents["length"].to_numpy(),
        lens.meta.window,
        lens.meta.stride,
        prefix,
    )
    owner = np.searchsorted(grid.start + grid.skip, place, side="right") - 1
    used, window = np.unique(owner, return_inverse=True)
    length = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(length, window, place - grid.start[used][window] + 1)
    columns = {name: getattr(grid, name)[used] for name in ("document", "start", "skip")}
    return replace(grid, length=length, **columns), window
