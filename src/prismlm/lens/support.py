"""How near the corpus comes to text of its own kind that it does not hold: the scale of support.

For a prediction of y at a state z, the nearest position is the one with the largest cosine among
those of the active cells whose next token is y. For stretches of the corpus's other split, read by
themselves, that is what text of the same kind finds which the lens does not have; where there is no
such split, for stretches of its own documents with each left out. F is the percentile of a nearest
cosine among theirs. What is as near as their median is near enough to say that a document carries a
prediction; :mod:`prismlm.explain.support` says what becomes of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prismlm.layers import PrototypeHead
from prismlm.lens.cells import Cells
from prismlm.lens.neighbours import nearest_of, neighbours
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

# Stretches that the scale is measured on, and the predictions of each.
DOCUMENTS, RUN = 160, 32
READ_TOGETHER = 8
MIN_DOCUMENTS = 40
PERCENTILES = 101


@dataclass(frozen=True)
class SupportScale:
    """What unseen text of the corpus has.

    Attributes:
        nearest: percentiles 0 to 100 of the nearest cosine of single predictions.
        predictions: how many it was measured on.
    """

    nearest: list[float]
    predictions: int

    @property
    def median(self) -> float:
        """The nearest cosine of the median prediction of unseen text."""
        return self.nearest[len(self.nearest) // 2]

    def score(self, nearest: np.ndarray) -> np.ndarray:
        """Return F: the share of unseen predictions with a smaller nearest cosine, in [0, 1]."""
        rank = np.searchsorted(np.array(self.nearest), nearest, side="right")
        return np.clip((rank - 0.5) / len(self.nearest), 0, 1)


def measure_support(
    cells: Cells,
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    split: Split,
    progress: Reporter = SILENT,
) -> SupportScale | None:
    """Measure the scale on stretches of 32 predictions of 160 documents that the cells lack.

    None where there is too little text to measure it.
    """
    stretches = calibration_stretches(corpus, split)
    found: list[np.ndarray] = []
    with progress.task("Measuring support", len(stretches), "stretches") as task:
        for first in range(0, len(stretches), READ_TOGETHER):
            part = stretches[first : first + READ_TOGETHER]
            found += leave_one_out(cells, model, head, corpus, part)
            task.advance(len(part))
    if not found:
        return None
    nearest = np.concatenate(found)
    grid = np.quantile(nearest, np.linspace(0, 1, PERCENTILES)).tolist()
    return SupportScale(grid, len(nearest))


def unseen_documents(corpus: Corpus, split: Split) -> np.ndarray:
    """Return the documents of the other split, or, where they are too few, those of this one."""
    others = np.setdiff1d(corpus.split("all"), corpus.split(split))
    others = others[corpus.lengths[others] > 2]
    return others if len(others) >= MIN_DOCUMENTS else corpus.split(split)


def calibration_stretches(corpus: Corpus, split: Split) -> list[tuple[int, int]]:
    """Return where stretches of unseen documents start, and their tokens; one a document."""
    generator, before = np.random.default_rng(0), len(corpus.prefix)
    documents = unseen_documents(corpus, split)
    # Without what stands before a text and after it.
    lengths = corpus.lengths[documents] - 1 - before
    usable = np.flatnonzero(lengths > 1)
    chosen = np.sort(generator.choice(usable, min(DOCUMENTS, len(usable)), replace=False))
    room = np.maximum(1, lengths[chosen] - RUN)
    offset = before + (generator.random(len(chosen)) * room).astype(np.int64)
    start = corpus.starts[documents[chosen]] + offset
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

    A stretch is the global position of its first token and its tokens, all of one document; each
    but the first is predicted: float32 [tokens − 1] of each stretch.
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
    z, tokens = seen.z[:, before:-1].float().cpu()[predicts], ids[:, before + 1 :][predicts]
    states = z * inverse_norms(z)
    # The prototypes in use at each state that speak for the token.
    used = head.nearest(states.to(head.prototypes.device))
    weight = weight_of(model)
    signature = (weight[tokens].float() - weight.float().mean(0)).to(head.prototypes.device)
    speaks = torch.einsum("nkd,nd->nk", head.prototypes.float()[used.indices], signature)
    query, slot = ((used.activations > 0) & (speaks > 0)).nonzero(as_tuple=True)
    cell, query = used.indices[query, slot].cpu().numpy(), query.cpu().numpy()
    found = neighbours(cells, query, cell, tokens.numpy()[query], states)
    owner = query[found.pair]
    starts = [int(corpus.starts[corpus.document_at(start)]) for start, _ in stretches]
    others = cells.starts[cells.document_of(found.place)] != np.repeat(starts, counts)[owner]
    nearest = nearest_of(found.cosine[others], owner[others], len(tokens))
    return np.split(nearest, np.cumsum(counts)[:-1])
