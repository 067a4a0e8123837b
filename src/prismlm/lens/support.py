"""The scale of support: how near the corpus comes to text of its kind that it does not contain.

The nearest position of a prediction of y at a state z is the one with the largest cosine to z
among those in the active cells whose next token is y. The scale has the nearest cosines of excerpts
of the corpus's other split, each read by itself; if that is too small, of its own documents, each
leaving itself out. At the median or above, a document is near enough to carry a prediction;
:mod:`prismlm.explain.attribution` uses this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from prismlm.layers import PrototypeHead
from prismlm.lens.cells import Cells, neighbours
from prismlm.models.seam import last_states
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

# Excerpts that the scale is measured on, and the predictions of each.
DOCUMENTS, LENGTH = 160, 32
BATCH = 8
MIN_DOCUMENTS = 40
PERCENTILES = 101


@dataclass(frozen=True)
class SupportScale:
    """The distribution of nearest cosines for unseen text."""

    nearest: list[float]  # percentiles 0 to 100 over predictions
    predictions: int

    @cached_property
    def median(self) -> float:
        """The nearest cosine of the median prediction."""
        return self.nearest[len(self.nearest) // 2]


def measure_support(
    cells: Cells,
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    split: Split,
    progress: Reporter = SILENT,
) -> SupportScale | None:
    """Measure the scale of a lens of a split of the corpus; None without text to measure it on."""
    excerpts = sample_excerpts(corpus, split)
    nearest = np.empty(0, dtype=np.float32)
    with progress.task("Measuring support", len(excerpts), "excerpts") as task:
        for first in range(0, len(excerpts), BATCH):
            batch = excerpts[first : first + BATCH]
            nearest = np.append(nearest, leave_one_out(cells, model, head, corpus, batch))
            task.advance(len(batch))
    if not len(nearest):
        return None
    percentiles = np.quantile(nearest, np.linspace(0, 1, PERCENTILES)).tolist()
    return SupportScale(percentiles, len(nearest))


def sample_excerpts(corpus: Corpus, split: Split) -> list[tuple[int, int]]:
    """Return the first position and the tokens of excerpts, one per document, drawn by seed."""
    generator, prefix = np.random.default_rng(0), len(corpus.prefix)
    others = np.setdiff1d(corpus.split("all"), corpus.split(split), assume_unique=True)
    others = others[corpus.lengths[others] > 2]
    documents = others if len(others) >= MIN_DOCUMENTS else corpus.split(split)
    lengths = corpus.lengths[documents] - 1 - prefix
    usable = np.flatnonzero(lengths > 1)
    sample = np.sort(generator.choice(usable, min(DOCUMENTS, len(usable)), replace=False))
    room = np.maximum(1, lengths[sample] - LENGTH)
    offset = prefix + (generator.random(len(sample)) * room).astype(np.int64)
    start = corpus.starts[documents[sample]] + offset
    return list(zip(start.tolist(), np.minimum(LENGTH + 1, lengths[sample]).tolist(), strict=True))


@torch.no_grad()
def leave_one_out(
    cells: Cells,
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    excerpts: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Return the nearest cosine, in other documents, of each prediction of some excerpts.

    An excerpt is the global position of its first token and its length, within one document; all
    tokens but the first are predicted: float32 [Σ (length − 1)], −1 without such a position.
    """
    texts = [corpus.read_tokens(*excerpt).tolist() for excerpt in excerpts]
    counts = [len(text) - 1 for text in texts]
    z = last_states(model, [[*corpus.prefix, *text[:-1]] for text in texts], counts).float().cpu()
    states, tokens = z * inverse_norms(z), torch.tensor([t for text in texts for t in text[1:]])
    # The active prototypes of each state that raise the token.
    active = head.nearest(states.to(head.prototypes.device))
    weight = weight_of(model)
    signature = (weight[tokens].float() - weight.float().mean(0)).to(head.prototypes.device)
    raised = torch.einsum("nkd,nd->nk", head.prototypes.float()[active.indices], signature) > 0
    query, slot = ((active.activations > 0) & raised).nonzero(as_tuple=True)
    cell, query = active.indices[query, slot].cpu().numpy(), query.cpu().numpy()
    near = neighbours(cells, query, cell, tokens.numpy()[query], states)
    owner = query[near.pair]
    starts = [int(corpus.starts[corpus.document_at(start)]) for start, _ in excerpts]
    others = cells.starts[cells.document_of(near.position)] != np.repeat(starts, counts)[owner]
    nearest = np.full(len(tokens), -1, dtype=np.float32)
    np.maximum.at(nearest, owner[others], near.cosine[others])
    return nearest
