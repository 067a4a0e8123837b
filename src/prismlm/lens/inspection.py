"""Figures of a finished lens: whether it has converged, and how varied its contexts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from scipy.special import entr

from prismlm.lens import layout
from prismlm.lens.lens import Lens

# States with a larger cosine have nearly the same context.
NEAR_DUPLICATE = 0.999
CONVERGED = 0.99
# Enough text: converged after this share of it, with this share of prototypes having all contexts.
ENOUGH_AT, FILLED = 0.5, 0.95
META_FIELDS = ("tokens", "share_read", "documents", "split", "trained_on")
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def inspect_lens(lens: Lens) -> dict[str, Any]:
    """Measure a lens, as JSON values; every file is compared with its digest.

    - ``share_read``: of the windows of the corpus; ``tokens`` and all other figures are of these
    - ``with_contexts``, ``in_use``: prototypes with a context, and those used at least once
    - ``kept``, ``filled``: contexts kept per prototype, and prototypes in use that have as many
    - ``converged_at``: the first share of the text at which the mean nearest cosine is within 1 %
      of its final value; None without a curve
    - ``enough``, ``verdict``: see :func:`verdict`
    - ``spread``, ``by_prototype``: of the contexts of each prototype, ``documents``;
      ``effective_documents``, exp of the entropy of activation over these; ``effective_sources``,
      the same over the sources of all positions that use it; ``duplicates``, with the text, or
      state if there is no text, of a better one; ``near_duplicates``, with a cosine above 0.999 to
      the state of a better one
    """
    lens.files.check(lens.meta)
    spread, meta, document = _spread(lens), lens.meta, lens.documents.codes
    used, count = lens.prototypes["usage"].to_numpy() > 0, max(1, len(document))
    last = meta.convergence[-1]["mean_nearest_cosine"] if meta.convergence else 0.0
    near = last - (1 - CONVERGED) * abs(last)
    converged = (row["share"] for row in meta.convergence if row["mean_nearest_cosine"] >= near)
    converged_at, in_use = next(converged, None), int(used.sum())
    filled = int((used & (spread["documents"] >= meta.contexts)).sum())
    enough, sentence = verdict(converged_at, in_use, filled, meta.contexts)
    columns = {"prototype": np.arange(lens.num_prototypes), **spread}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return {
        **{name: getattr(meta, name) for name in META_FIELDS},
        "prototypes": lens.num_prototypes,
        "with_contexts": int((spread["documents"] > 0).sum()),
        "in_use": in_use,
        "kept": meta.contexts,
        "filled": filled,
        "convergence": meta.convergence,
        "converged_at": converged_at,
        "contexts": len(document),
        "distinct_documents": len(np.unique(document)),
        "largest_document_share": float(np.bincount(document, minlength=1).max() / count),
        "duplicate_share": float(spread["duplicates"].sum() / count),
        "near_duplicate_share": float(spread["near_duplicates"].sum() / count),
        "spread": {
            name: {label: float(np.quantile(values, q)) for label, q in QUANTILES.items()}
            for name, values in spread.items()
        },
        "licenses": [{"license": k, "share": v} for k, v in lens.shares("license").items()],
        "enough": enough,
        "verdict": sentence,
        "by_prototype": [dict(zip(columns, row, strict=True)) for row in rows],
    }


def verdict(
    converged_at: float | None, in_use: int, filled: int, kept: int
) -> tuple[bool | None, str]:
    """Return whether there was enough text for an index, None if unknown, and why.

    The second half of the text must have raised the mean nearest cosine by less than 1 %, and 95 %
    of the prototypes in use must have all their contexts.
    """
    if converged_at is None:
        return None, "Unknown whether there was enough text: the lens has no convergence curve."
    enough = converged_at <= ENOUGH_AT and filled >= FILLED * in_use
    return enough, (
        f"{'Enough' if enough else 'Not enough'} text for this index: the mean nearest cosine was "
        f"within 1 % of its last value after {converged_at:.0%} of the text, and {filled:,} of "
        f"{in_use:,} active prototypes have their {kept} stored contexts."
        f"{'' if enough else ' Index a larger corpus.'}"
    )


def _spread(lens: Lens) -> dict[str, np.ndarray]:
    """Return the figures of each prototype's contexts, [K] each."""
    index, (sources, codes) = lens.index, lens.keys("mass", "source")
    columns = (index[name].to_pylist() for name in ("before", "token", "after"))
    texts = list(zip(*columns, strict=True)) if lens.meta.with_text else None
    activation = np.zeros((lens.num_prototypes, lens.meta.contexts))
    cell = index["prototype"].to_numpy(), index["rank"].to_numpy()
    activation[cell] = index["activation"].to_numpy()
    by_source = np.zeros((lens.num_prototypes, len(sources)))
    cell = lens.mass["prototype"].to_numpy(), codes
    np.add.at(by_source, cell, lens.mass["activation_sum"].to_numpy())
    duplicates, near = np.zeros((2, lens.num_prototypes), np.int64)
    for prototype in range(lens.num_prototypes):
        contexts = lens.rows_of(prototype)
        state = lens.states[contexts].float()
        distinct = len(set(texts[contexts]) if texts else torch.unique(state, dim=0))
        duplicates[prototype] = len(state) - distinct
        near[prototype] = ((state @ state.T).tril(-1) > NEAR_DUPLICATE).any(1).sum()
    return {
        "documents": np.diff(lens.first_rows),
        "effective_documents": _effective_number(activation),
        "effective_sources": _effective_number(by_source),
        "duplicates": duplicates,
        "near_duplicates": near,
    }


def _effective_number(weights: np.ndarray) -> np.ndarray:
    """Return exp of the entropy of each row of non-negative weights, 0 if all are 0: [K]."""
    total = weights.sum(1)
    share = weights / np.where(total > 0, total, 1)[:, None]
    return np.where(total > 0, np.exp(entr(share).sum(1)), 0.0)


def lens_summary(directory: Path) -> dict[str, int | float]:
    """Return how much a lens holds; ``summed_share`` as :func:`summed_share`."""
    meta, usage = layout.read_meta(directory), _column(directory, layout.PROTOTYPES_FILE, "usage")
    contexts = _column(directory, layout.INDEX_FILE, "prototype")
    return {
        "tokens": meta.tokens,
        "share_read": meta.share_read,
        "documents": meta.documents,
        "positions": int(meta.cells["rows"]),
        "prototypes": len(usage),
        "with_contexts": len(contexts.unique()),
        "in_use": int((usage.to_numpy() > 0).sum()),
        "summed_share": summed_share(directory),
    }


def summed_share(directory: Path) -> float:
    """Return the share of uses whose source has no rows in ``mass.parquet``, in [0, 1]."""
    mass = layout.read_table(directory / layout.MASS_FILE, layout.MASS_SCHEMA, ["source", "tokens"])
    summed = mass.filter(pc.field("source") == layout.OTHER)["tokens"].to_numpy().sum()
    return float(summed / max(1, mass["tokens"].to_numpy().sum()))


def _column(directory: Path, file: str, name: str) -> pa.ChunkedArray:
    return layout.read_table(directory / file, layout.SCHEMAS[file], [name])[name]
