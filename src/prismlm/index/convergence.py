"""What a finished lens says about itself: had it converged, and how varied are its contexts?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from prismlm.index import layout
from prismlm.index.lens import Lens

# Unit states closer than this are the same place in all but rounding and a few tokens.
NEAR_DUPLICATE = 0.999
CONVERGED = 0.99
# An index has enough text where so little of it converges it, and so many prototypes are filled.
ENOUGH_AT = 0.5
FILLED = 0.95
QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True)
class Spread:
    """How widely each prototype's contexts lie, one entry per prototype.

    Attributes:
        documents: documents among its contexts; one context each.
        effective_documents: exp of the entropy of activation over these documents.
        effective_sources: the same over the sources of all positions that use it; 0 if none does.
        duplicates: contexts whose text, or state where there is none, a better one has too.
        near_duplicates: contexts whose state has a cosine above 0.999 to a better one's.
    """

    documents: np.ndarray
    effective_documents: np.ndarray
    effective_sources: np.ndarray
    duplicates: np.ndarray
    near_duplicates: np.ndarray

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Return quantiles over the prototypes of every figure."""
        return {
            name: {
                label: float(np.quantile(values, q)) if len(values) else 0.0
                for label, q in QUANTILES.items()
            }
            for name, values in vars(self).items()
        }


@dataclass(frozen=True)
class LensInspection:
    """A lens in figures.

    Attributes:
        tokens: predictions read.
        documents: documents read.
        split: of which split of the corpus.
        trained_on: whether the model was trained on this corpus, if known.
        prototypes: K.
        with_contexts: prototypes that have a context.
        in_use: prototypes used at least once.
        kept: places that are kept of each prototype where the text has as many.
        filled: prototypes in use that have as many.
        convergence: the mean nearest cosine after growing shares of the corpus.
        converged_at: the first share at which it is within 1 % of its last value; None without a
            curve.
        contexts: contexts kept.
        distinct_documents: documents that any of them comes from.
        largest_document_share: the share of contexts that one document gives.
        duplicate_share: duplicates among all contexts of their prototype.
        near_duplicate_share: near duplicates likewise.
        spread: of every prototype.
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
    spread: Spread

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
        every = "all" if self.filled == self.in_use else f"{self.filled:,} of"
        filled = f"{every} {self.in_use:,} active prototypes have their {self.kept} stored contexts"
        if self.converged_at is None:
            return (
                f"Whether there was enough text cannot be told: {filled}, and this lens was built "
                "before convergence was noted. Build it again."
            )
        settled = self.converged_at <= ENOUGH_AT
        closer = (
            f"the second half of the text brought prototypes {'less' if settled else 'more'} than "
            "1 % closer to their nearest place"
        )
        joined = "and" if settled == (self.filled >= FILLED * self.in_use) else "but"
        found, way_out = (
            ("Enough", "") if self.enough else ("Not enough", " Index a larger corpus.")
        )
        return f"{found} text for this index: {closer}, {joined} {filled}.{way_out}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: quantiles of the spread, and the spread of each prototype."""
        value = asdict(self) | {"spread": self.spread.quantiles()}
        columns = {name: column.tolist() for name, column in vars(self.spread).items()}
        value |= {"enough": self.enough, "verdict": self.verdict}
        value["by_prototype"] = [
            {"prototype": number, **dict(zip(columns, row, strict=True))}
            for number, row in enumerate(zip(*columns.values(), strict=True))
        ]
        return value


def inspect_lens(lens: Lens) -> LensInspection:
    """Measure a lens; every file is read and compared with what was written.

    Raises:
        FormatError: a file is damaged.
    """
    layout.check_files(lens.path, lens.meta)
    spread = _spread(lens)
    usage = lens.prototypes["usage"].to_numpy()
    _, document = lens.documents
    count = len(document)
    curve = lens.meta.convergence
    return LensInspection(
        tokens=lens.meta.tokens,
        documents=lens.meta.documents,
        split=lens.meta.split,
        trained_on=lens.meta.trained_on,
        prototypes=lens.num_prototypes,
        with_contexts=int((spread.documents > 0).sum()),
        in_use=int((usage > 0).sum()),
        kept=lens.meta.contexts,
        filled=int(((usage > 0) & (spread.documents >= lens.meta.contexts)).sum()),
        convergence=curve,
        converged_at=_converged_at(curve),
        contexts=count,
        distinct_documents=len(np.unique(document)),
        largest_document_share=float(np.bincount(document).max() / count) if count else 0.0,
        duplicate_share=float(spread.duplicates.sum() / max(count, 1)),
        near_duplicate_share=float(spread.near_duplicates.sum() / max(count, 1)),
        spread=spread,
    )


def _converged_at(curve: list[dict[str, float]]) -> float | None:
    if not curve:
        return None
    last = curve[-1]["mean_nearest_cosine"]
    enough = last - (1 - CONVERGED) * abs(last)
    return next(point["share"] for point in curve if point["mean_nearest_cosine"] >= enough)


def _spread(lens: Lens) -> Spread:
    activation = lens.index["activation"].to_numpy()
    texts = _texts(lens.index) if lens.meta.with_text else None
    documents, effective, same, near = (np.zeros(lens.num_prototypes) for _ in range(4))
    for prototype in range(lens.num_prototypes):
        rows = lens.rows_of(prototype)
        documents[prototype] = rows.stop - rows.start
        effective[prototype] = _effective(activation[rows])
        state = lens.states[rows].float()
        cosines = (state @ state.T).tril(-1)
        near[prototype] = int((cosines > NEAR_DUPLICATE).any(1).sum())
        distinct = len(set(texts[rows])) if texts is not None else len(torch.unique(state, dim=0))
        same[prototype] = documents[prototype] - distinct
    sources = np.array([_effective(row) for row in _source_shares(lens)])
    return Spread(documents.astype(int), effective, sources, same.astype(int), near.astype(int))


def _source_shares(lens: Lens) -> np.ndarray:
    """Return the share of each source in the activation of each prototype, [K, sources]."""
    names, codes = lens.keys("mass", "source")
    shares = np.zeros((lens.num_prototypes, len(names)))
    at = lens.mass["prototype"].to_numpy(), codes
    np.add.at(shares, at, lens.mass["activation_sum"].to_numpy())
    total = shares.sum(1, keepdims=True)
    return np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)


def _texts(index: pa.Table) -> list[tuple[str, ...]]:
    columns = (index[name].to_pylist() for name in ("before", "token", "after"))
    return list(zip(*columns, strict=True))


def _effective(weights: np.ndarray) -> float:
    """Return exp of the entropy of weights, normalised: how many equal ones would be as spread."""
    positive = weights[weights > 0].astype(np.float64)
    if not len(positive):
        return 0.0
    share = positive / positive.sum()
    return float(np.exp(-(share * np.log(share)).sum()))
