"""Two models of one tokenizer side by side on the same texts: losses, sources and support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import tee
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from prismlm.corpus.tokenizer import tokenizer_fingerprint
from prismlm.errors import InputError
from prismlm.explain.attribution import AttributionSum, Sources
from prismlm.explain.support import support_counts
from prismlm.explain.texts import read_texts, window_of
from prismlm.lens.layout import GROUP_COLUMNS

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM


def check_comparable(a: PrismLM, b: PrismLM) -> None:
    """Raise InputError unless two models read the same tokens."""
    fingerprints = {tokenizer_fingerprint(lm.tokenizer) for lm in (a, b)}
    if len(fingerprints) > 1 or None in fingerprints:
        raise InputError(
            f"{a.path} and {b.path} have different tokenizers, so losses per token cannot be "
            "compared. Compare models of one tokenizer, or two checkpoints."
        )


def compare_texts(a: PrismLM, b: PrismLM, documents: Iterable[Document]) -> dict[str, Any]:
    """Run both models on the same texts, window by window.

    Returns:
        ``texts``, ``predictions``, ``ce``, its difference per text with predictions, mean and
        standard error, ``shares`` if both have a lens, and ``support`` if both have a scale of it.
    """
    check_comparable(a, b)
    models, window = (a, b), window_of([a, b])
    copies = zip(models, tee(documents), strict=True)
    pairs = zip(*(read_texts(lm, copy, window) for lm, copy in copies), strict=True)
    sums = [lm.lens and AttributionSum(lm.lens) for lm in models]
    counts, texts = (Counter[str](), Counter[str]()), 0
    losses: list[list[float]] = []
    sizes: list[int] = []
    for pair in pairs:
        texts += 1
        if not len(pair[0].losses):
            continue
        sizes.append(len(pair[0].losses))
        losses.append([float(text.losses.sum(dtype=np.float64)) for text in pair])
        for text, total, count in zip(pair, sums, counts, strict=True):
            if total is not None and text.attribution is not None:
                total.add(text.attribution)
            count.update(text.support.sums if text.support else {})
    if not losses:
        raise InputError("the texts hold nothing to predict: expected at least one of two tokens.")
    totals = np.array(losses)
    ce, differences = totals.sum(0) / sum(sizes), (totals[:, 1] - totals[:, 0]) / sizes
    error = float(stats.sem(differences)) if len(differences) > 1 else None
    attributions = [total.result() for total in sums if total]
    supports = [support_counts(count) for count in counts]
    return {
        "texts": texts,
        "predictions": sum(sizes),
        "ce": {"a": ce[0], "b": ce[1], "difference": ce[1] - ce[0]},
        "ce_difference_per_text": {"mean": float(np.mean(differences)), "standard_error": error},
        "shares": {by: _shares(*(one.sources(by) for one in attributions)) for by in GROUP_COLUMNS}
        if len(attributions) == 2
        else None,
        "support": None if None in supports else dict(zip("ab", supports, strict=True)),
    }


def _shares(a: Sources, b: Sources) -> dict[str, Any]:
    left, right = ({item.key: item.share for item in side.items} for side in (a, b))
    rows = [(key, left.get(key, 0.0), right.get(key, 0.0)) for key in left | right]
    rows.sort(key=lambda row: -(row[1] + row[2]))
    return {
        "items": [{"key": k, "a": x, "b": y, "difference": y - x} for k, x, y in rows],
        "unattributed": {"a": a.unattributed, "b": b.unattributed},
    }
