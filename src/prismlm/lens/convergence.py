"""What a finished lens says about itself: had it converged, and how varied are its contexts?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from prismlm.lens import layout
from prismlm.lens.lens import Lens

# Unit states closer than this are the same place in all but rounding and a few tokens.
NEAR_DUPLICATE = 0.999
CONVERGED = 0.99
# An index has enough text where so little of it converges it, and so many prototypes are filled.
ENOUGH_AT, FILLED = 0.5, 0.95
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True)
class LensInspection:
    """A lens in figures.

    Attributes:
        tokens, documents, split, trained_on: as of :class:`~prismlm.lens.layout.LensMeta`.
        prototypes: K.
        with_contexts, in_use: prototypes that have a context, that are used at least once.
        kept: places that are kept of each prototype where the text has as many.
        filled: prototypes in use that have as many.
        convergence: the mean nearest cosine after growing shares of the corpus.
        converged_at: the first share at which it is within 1 % of its last value; None without a
            curve.
        contexts, distinct_documents: contexts kept, and documents that any of them comes from.
        largest_document_share: the share of contexts that one document gives.
        duplicate_share, near_duplicate_share: among all contexts of their prototype.
        spread: how widely each prototype's contexts lie, [K] by figure: ``documents`` among them,
            one context each; ``effective_documents``, exp of the entropy of activation over these;
            ``effective_sources``, the same over the sources of all positions that use it, 0 if
            none does; ``duplicates``, contexts whose text, or state where there is none, a better
            one has too; ``near_duplicates``, with a cosine above 0.999 to a better one's state.
    """

    tokens: int
    documents: int
    split: str
    trained_on: layout.TrainedOn
    prototypes: int
    with_contexts: int
    in_use: int
    kept: int
    filled: int
    convergence: list[dict[str, float]]
    converged_at: float | None
    contexts: int
    distinct_documents: int
    largest_document_share: float
    duplicate_share: float
    near_duplicate_share: float
    spread: dict[str, np.ndarray]

    @property
    def enough(self) -> bool | None:
        """Whether more text would change little; None where convergence was not noted.

        The second half of the text must have brought the mean nearest cosine less than 1 %, and 95
        of 100 prototypes in use must have all the places that are kept.
        """
        if self.converged_at is None:
            return None
        return self.converged_at <= ENOUGH_AT and self.filled >= FILLED * self.in_use

    @property
    def verdict(self) -> str:
        """Whether there was enough text for this index, and why, in a sentence."""
        if self.converged_at is None:
            return "Whether there was enough text cannot be told: the lens has no curve."
        said = "Enough text" if self.enough else "Not enough text"
        way_out = "" if self.enough else " Index a larger corpus."
        return (
            f"{said} for this index: the mean nearest cosine was within 1 % of its last value "
            f"after {self.converged_at:.0%} of the text, and {self.filled:,} of {self.in_use:,} "
            f"active prototypes have their {self.kept} stored contexts.{way_out}"
        )

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Return quantiles over the prototypes of every figure of the spread."""
        return {
            name: {label: float(np.quantile(values, q)) for label, q in QUANTILES.items()}
            for name, values in self.spread.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: quantiles of the spread, and the spread of each prototype."""
        columns = {"prototype": np.arange(self.prototypes), **self.spread}
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return asdict(self) | {
            "spread": self.quantiles(),
            "enough": self.enough,
            "verdict": self.verdict,
            "by_prototype": [dict(zip(columns, row, strict=True)) for row in rows],
        }


def inspect_lens(lens: Lens) -> LensInspection:
    """Measure a lens; every file is read and compared with what was written.

    Raises:
        FormatError: a file is damaged.
    """
    layout.check_files(lens.path, lens.meta)
    spread, meta, curve = _spread(lens), lens.meta, lens.meta.convergence
    used = lens.prototypes["usage"].to_numpy() > 0
    document = lens.documents.codes
    count = max(1, len(document))
    last = curve[-1]["mean_nearest_cosine"] if curve else 0.0
    near = last - (1 - CONVERGED) * abs(last)
    shares = (point["share"] for point in curve if point["mean_nearest_cosine"] >= near)
    return LensInspection(
        tokens=meta.tokens,
        documents=meta.documents,
        split=meta.split,
        trained_on=meta.trained_on,
        prototypes=lens.num_prototypes,
        with_contexts=int((spread["documents"] > 0).sum()),
        in_use=int(used.sum()),
        kept=meta.contexts,
        filled=int((used & (spread["documents"] >= meta.contexts)).sum()),
        convergence=curve,
        converged_at=next(shares, None),
        contexts=len(document),
        distinct_documents=len(np.unique(document)),
        largest_document_share=float(np.bincount(document, minlength=1).max() / count),
        duplicate_share=float(spread["duplicates"].sum() / count),
        near_duplicate_share=float(spread["near_duplicates"].sum() / count),
        spread=spread,
    )


def _spread(lens: Lens) -> dict[str, np.ndarray]:
    activation = lens.index["activation"].to_numpy()
    columns = (lens.index[name].to_pylist() for name in ("before", "token", "after"))
    texts = list(zip(*columns, strict=True)) if lens.meta.with_text else None
    sources, codes = lens.keys("mass", "source")
    by_source = np.zeros((lens.num_prototypes, len(sources)))
    place = lens.mass["prototype"].to_numpy(), codes
    np.add.at(by_source, place, lens.mass["activation_sum"].to_numpy())
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
