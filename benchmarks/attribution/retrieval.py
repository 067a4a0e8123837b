"""What attribution has to beat: finding documents by their words, or by their hidden states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.models.seam import capture
from prismlm.ops.prototype_head.routing import inverse_norms


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """Okapi BM25 over words (Robertson and Zaragoza 2009), as Lucene weighs rare words.

    score(d, q) = Σ_w idf_w · f (k₁ + 1) / (f + k₁ (1 − b + b · |d| / mean |d|)),
    idf_w = ln(1 + (N − n_w + ½) / (n_w + ½)), f the times that w occurs in d, n_w the documents
    with w in them; a word counts as often as it stands in the query.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.k1 = k1
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], dtype=np.float64)
        self._norm = k1 * (1 - b + b * lengths / lengths.mean())
        self._postings: dict[str, list[tuple[int, int]]] = {}
        for document, count in enumerate(counts):
            for word, times in count.items():
                self._postings.setdefault(word, []).append((document, times))

    def scores(self, query: str) -> np.ndarray:
        """Return the score of every document, float64 [documents]."""
        scores = np.zeros(len(self._norm))
        for word in words(query):
            if word in self._postings:
                documents, times = np.array(self._postings[word]).T
                found = len(documents)
                idf = np.log1p((len(scores) - found + 0.5) / (found + 0.5))
                scores[documents] += idf * times * (self.k1 + 1) / (times + self._norm[documents])
        return scores


@torch.inference_mode()
def nearest_cosines(
    model: PreTrainedModel,
    corpus: Corpus,
    documents: np.ndarray,
    states: Tensor,
    *,
    window: int,
    stride: int,
    tokens_per_batch: int = 4096,
) -> np.ndarray:
    """Return each document's largest cosine to each state, over the positions an index reads.

    Args:
        states: unit vectors, float32 [Q, d].

    Returns:
        float32 [Q, len(documents)], columns in the order of ``documents``.
    """
    column = np.full(len(corpus), -1, dtype=np.int64)
    column[documents] = np.arange(len(documents))
    best = torch.full((len(states), len(documents)), -2.0)
    grid = document_windows(documents, corpus.starts, corpus.lengths, window, stride)
    for batch in window_batches(grid, corpus, tokens_per_batch, corpus.eos_token_id):
        with capture(model, logits=False) as seen:
            model(
                input_ids=batch.input_ids.to(model.device),
                attention_mask=batch.attention_mask.to(model.device).long(),
                use_cache=False,
            )
        z = seen.z.float().cpu()
        z = z * inverse_norms(z.flatten(0, 1)).view(*z.shape[:2], 1)
        owned = batch.owned & (batch.input_ids != corpus.eos_token_id)
        for row, document in enumerate(batch.document.tolist()):
            if document >= 0 and bool(owned[row].any()):
                place = int(column[document])
                nearest = (z[row][owned[row]] @ states.T).amax(0)
                best[:, place] = torch.maximum(best[:, place], nearest)
    return best.numpy()
