"""Figures of a finished lens: above all whether it read enough text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prismlm.lens import layout
from prismlm.lens.lens import Lens

CONVERGED = 0.99
# Enough text: converged after this share of it, with this share of prototypes having all contexts.
ENOUGH_AT, FILLED = 0.5, 0.95
META_FIELDS = ("tokens", "share_read", "documents", "split", "trained_on")


def inspect_lens(lens: Lens) -> dict[str, Any]:
    """Measure a lens, as JSON values; every file is compared with its digest.

    - ``share_read``: of the windows of the corpus; ``tokens`` and all other figures are of these
    - ``with_contexts``, ``in_use``: prototypes with a context, and those used at least once
    - ``kept``, ``filled``: contexts kept per prototype, and prototypes in use that have as many
    - ``converged_at``: the first share of the text at which the mean nearest cosine is within 1 %
      of its final value
    - ``enough``, ``verdict``: see :func:`verdict`
    """
    lens.files.check(lens.meta)
    meta, contexts, kept = lens.meta, lens.index, np.diff(lens.first_rows)
    used = lens.prototypes["usage"].to_numpy() > 0
    last = meta.convergence[-1]["mean_nearest_cosine"] if meta.convergence else 0.0
    near = last - (1 - CONVERGED) * abs(last)
    converged = (row["share"] for row in meta.convergence if row["mean_nearest_cosine"] >= near)
    converged_at, in_use = next(converged, 1.0), int(used.sum())
    filled = int((used & (kept >= meta.contexts)).sum())
    enough, sentence = verdict(converged_at, in_use, filled, meta.contexts)
    return {
        **{name: getattr(meta, name) for name in META_FIELDS},
        "prototypes": lens.num_prototypes,
        "with_contexts": int((kept > 0).sum()),
        "in_use": in_use,
        "kept": meta.contexts,
        "filled": filled,
        "convergence": meta.convergence,
        "converged_at": converged_at,
        "contexts": len(contexts),
        "distinct_documents": len(contexts["doc_id"].unique()),
        "licenses": [{"license": k, "share": v} for k, v in lens.shares("license").items()],
        "enough": enough,
        "verdict": sentence,
    }


def verdict(converged_at: float, in_use: int, filled: int, kept: int) -> tuple[bool, str]:
    """Return whether there was enough text for an index, and why.

    The second half of the text must have raised the mean nearest cosine by less than 1 %, and 95 %
    of the prototypes in use must have all their contexts.
    """
    enough = converged_at <= ENOUGH_AT and filled >= FILLED * in_use
    return enough, (
        f"{'Enough' if enough else 'Not enough'} text for this index: the mean nearest cosine was "
        f"within 1 % of its last value after {converged_at:.0%} of the text, and {filled:,} of "
        f"{in_use:,} active prototypes have their {kept} stored contexts."
        f"{'' if enough else ' Index a larger corpus.'}"
    )


def lens_summary(directory: Path) -> dict[str, int | float]:
    """Return how much a lens holds."""
    meta = layout.read_meta(directory)
    usage = layout.read_prototypes(directory, meta)["usage"].to_numpy()
    return {
        "tokens": meta.tokens,
        "share_read": meta.share_read,
        "documents": meta.documents,
        "positions": int(meta.cells["rows"]),
        "prototypes": len(usage),
        "in_use": int((usage > 0).sum()),
    }
