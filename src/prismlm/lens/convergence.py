"""What a finished lens says about itself: had it converged, and how varied are its contexts?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from prismlm.lens import layout
from prismlm.lens.lens import Lens

# Unit states closer than this are the same place in all but rounding and a few tokens.
NEAR_DUPLICATE = 0.999
CONVERGED = 0.99
# An index has enough text where so little of it converges it, and so many prototypes are filled.
ENOUGH_AT, FILLED = 0.5, 0.95
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def inspect_lens(lens: Lens) -> dict[str, Any]:
    """Measure a lens, as JSON values; every file is read and compared with what was written.

    The last of the keys beside those of :class:`~prismlm.lens.layout.LensMeta`:

    - ``with_contexts``, ``in_use``: prototypes that have a context, that are used at least once
    - ``kept``, ``filled``: places that are kept of each prototype where the text has as many, and
      prototypes in use that have as many
    - ``converged_at``: the first share of the text at which the mean nearest cosine is within 1 %
      of its last value; None without a curve
    - ``licenses``: of the text that the lens holds, each with its share
    - ``largest_document_share``: the share of contexts that one document gives
    - ``enough``, ``verdict``: whether more text would change little, and why: see :func:`verdict`
    - ``spread``, ``by_prototype``: of each prototype's contexts ``documents`` among them;
      ``effective_documents``, exp of the entropy of activation over these; ``effective_sources``,
      the same over the sources of all positions that use it, 0 if none does; ``duplicates``, those
      whose text, or state where there is none, a better one has too; ``near_duplicates``, with a
      cosine above 0.999 to a better one's state

    Raises:
        FormatError: a file is damaged.
    """
    layout.check_files(lens.path, lens.meta)
    spread, meta, curve = _spread(lens), lens.meta, lens.meta.convergence
    used = lens.prototypes["usage"].to_numpy() > 0
    document = lens.documents.codes
    count = max(1, len(document))
    converged_at, in_use = _converged_at(curve), int(used.sum())
    filled = int((used & (spread["documents"] >= meta.contexts)).sum())
    enough, said = verdict(converged_at, in_use, filled, meta.contexts)
    columns = {"prototype": np.arange(lens.num_prototypes), **spread}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return {
        "tokens": meta.tokens,
        "documents": meta.documents,
        "split": meta.split,
        "trained_on": meta.trained_on,
        "prototypes": lens.num_prototypes,
        "with_contexts": int((spread["documents"] > 0).sum()),
        "in_use": in_use,
        "kept": meta.contexts,
        "filled": filled,
        "convergence": curve,
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
        "verdict": said,
        "by_prototype": [dict(zip(columns, row, strict=True)) for row in rows],
    }


def verdict(
    converged_at: float | None, in_use: int, filled: int, kept: int
) -> tuple[bool | None, str]:
    """Say whether there was enough text for an index, None where that cannot be told, and why.

    The second half of the text must have brought the mean nearest cosine less than 1 %, and 95 of
    100 prototypes in use must have all the places that are kept.
    """
    if converged_at is None:
        return None, "Whether there was enough text cannot be told: the lens has no curve."
    enough = converged_at <= ENOUGH_AT and filled >= FILLED * in_use
    return enough, (
        f"{'Enough' if enough else 'Not enough'} text for this index: the mean nearest cosine was "
        f"within 1 % of its last value after {converged_at:.0%} of the text, and {filled:,} of "
        f"{in_use:,} active prototypes have their {kept} stored contexts."
        f"{'' if enough else ' Index a larger corpus.'}"
    )


def _converged_at(curve: list[dict[str, Any]]) -> float | None:
    last = curve[-1]["mean_nearest_cosine"] if curve else 0.0
    near = last - (1 - CONVERGED) * abs(last)
    return next((one["share"] for one in curve if one["mean_nearest_cosine"] >= near), None)


def _spread(lens: Lens) -> dict[str, np.ndarray]:
    """Return how widely each prototype's contexts lie, [K] each."""
    activation = lens.index["activation"].to_numpy()
    columns = (lens.index[name].to_pylist() for name in ("before", "token", "after"))
    texts = list(zip(*columns, strict=True)) if lens.meta.with_text else None
    sources, codes = lens.keys("mass", "source")
    by_source = np.zeros((lens.num_prototypes, len(sources)))
    at = lens.mass["prototype"].to_numpy(), codes
    np.add.at(by_source, at, lens.mass["activation_sum"].to_numpy())
    rows: list[dict[str, float]] = []
    for prototype in range(lens.num_prototypes):
        own = lens.rows_of(prototype)
        state = lens.states[own].float()
        near = ((state @ state.T).tril(-1) > NEAR_DUPLICATE).any(1).sum()
        distinct = len(set(texts[own])) if texts is not None else len(torch.unique(state, dim=0))
        rows.append(
            {
                "documents": len(state),
                "effective_documents": _effective(activation[own]),
                "effective_sources": _effective(by_source[prototype]),
                "duplicates": len(state) - distinct,
                "near_duplicates": int(near),
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _effective(weights: np.ndarray) -> float:
    """Return exp of the entropy of weights, normalised: how many equal ones would be as spread."""
    positive = weights[weights > 0].astype(np.float64)
    if not len(positive):
        return 0.0
    share = positive / positive.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def lens_summary(directory: Path) -> dict[str, int | float]:
    """Return how much a lens holds: tokens and documents read, positions kept, and prototypes.

    ``with_contexts`` prototypes have at least one kept place, ``in_use`` were routed at least once.
    ``summed_share`` of all uses are of sources that have no rows of their own in ``mass.parquet``,
    because there were more than 2,048 combinations of source, domain and licence.
    """
    meta, usage = layout.read_meta(directory), _column(directory, layout.PROTOTYPES_FILE, "usage")
    contexts = _column(directory, layout.INDEX_FILE, "prototype")
    return {
        "tokens": meta.tokens,
        "documents": meta.documents,
        "positions": int(meta.cells["rows"]),
        "prototypes": len(usage),
        "with_contexts": len(contexts.unique()),
        "in_use": int((usage.to_numpy() > 0).sum()),
        "summed_share": summed_share(directory),
    }


def summed_share(directory: Path) -> float:
    """Return which share of all uses is of sources without rows of their own, in [0, 1]."""
    mass = layout.read_table(directory / layout.MASS_FILE, layout.MASS_SCHEMA, ["source", "tokens"])
    summed = mass.filter(pc.field("source") == layout.OTHER)["tokens"].to_numpy().sum()
    return float(summed / max(1, mass["tokens"].to_numpy().sum()))


def _column(directory: Path, file: str, name: str) -> pa.ChunkedArray:
    return layout.read_table(directory / file, layout.SCHEMAS[file], [name])[name]
