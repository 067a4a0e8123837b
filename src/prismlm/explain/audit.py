"""What a model's predictions over many texts rely on: one row per text, and sums over all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.explain.attribution import Attribution, AttributionSum
from prismlm.explain.shares import DocumentShare, Method, Sources
from prismlm.explain.summary import fits
from prismlm.explain.support import Support, SupportCount
from prismlm.explain.texts import OnPass, TextFigures, TextOptions, read_texts
from prismlm.lens.layout import GROUP_COLUMNS, key_of
from prismlm.lens.lens import Lens
from prismlm.lens.where import Conditions, Where, normalised

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

OF_A_LENS = ("split", "documents", "tokens", "trained_on")
KEYS_KEPT = 20  # of each column and text; the rest is summed as "others"
TEXTS_LISTED = 20
DOCUMENTS_LISTED = 20
LEAST_SHARE = 0.01  # of a document that a row names
# Characters of a text that say which it is; more of those listed, which may begin alike.
OPENING, OPENING_LISTED = 120, 400
# Of a row, what is as its text has it.
FIGURES = (
    *("text_id", "opening", "tokens", "predictions", "ce", "explained_share", "unattributed"),
    "elsewhere",
)
OF_A_DOCUMENT = ("doc_id", "share", "source", "domain", "license", "title", "position")
# Explained shares are counted in bins of 0.001, so that their median needs no list of all.
BINS_FROM, BINS_TO, BINS = -1.0, 3.0, 4000
MISFIT = (
    "The prototype head does not fit this model: the median explained share is not one that a "
    "working head has, from 0% to 100%. Attach a new one."
)


@dataclass(frozen=True)
class AuditedText:
    """One text of an audit.

    Attributes:
        text_id: its id, or file and row.
        opening: its first characters; of a chat those of what was asked.
        tokens, predictions: how many; each token but the first is predicted.
        ce: mean −log p of its tokens; None for a text of one token.
        explained_share: median over positions, for the model's top token.
        shares: by source, domain and license; None for a text of one token.
        documents: those with at least the audit's least share, the largest first.
        other_documents: what the other documents come to.
        support: how well the corpus supports the text, where that is known.
    """

    text_id: str
    opening: str
    tokens: int
    predictions: int
    ce: float | None
    explained_share: float | None
    shares: dict[str, Sources] | None
    documents: list[DocumentShare]
    other_documents: float = 0.0
    support: Support | None = None

    @property
    def unattributed(self) -> float | None:
        """The share that no training text stands behind."""
        return None if self.shares is None else self.shares["source"].unattributed

    @property
    def elsewhere(self) -> float | None:
        """The share of text that does not match the filter."""
        return None if self.shares is None else self.shares["source"].elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the report."""
        row: dict[str, Any] = {name: getattr(self, name) for name in FIGURES}
        row["opening"] = self.opening[:OPENING]
        row["support"] = None if self.support is None else self.support.level
        row["support_score"] = None if self.support is None else self.support.score
        for column in GROUP_COLUMNS:
            items = () if self.shares is None else self.shares[column].items
            kept = [{"key": item.key, "share": item.share} for item in items[:KEYS_KEPT]]
            row[f"by_{column}"] = kept
            row[f"other_{column}"] = sum(item.share for item in items[KEYS_KEPT:])
        row["documents"] = [{k: getattr(one, k) for k in OF_A_DOCUMENT} for one in self.documents]
        row["other_documents"] = self.other_documents
        return row


class Audit:
    """The sums over all texts; its size depends on the lens and not on how many texts there are.

    Attributes:
        texts: how many were read.
        tokens, predictions: over all texts.
    """

    def __init__(
        self,
        lm: PrismLM,
        options: TextOptions,
        where: Where | None = None,
        least_share: float = LEAST_SHARE,
    ) -> None:
        self.lens = lm.lens_for("training text to point to")
        self.model, self.options = str(lm.path), options
        self.where: Conditions = normalised(where)
        self.least_share = least_share
        self.texts = self.tokens = self.predictions = 0
        self._lm = lm
        self._loss = 0.0
        self._explained = np.zeros(BINS, dtype=np.int64)
        self._sum = AttributionSum(self.lens, options.method)
        self._support = SupportCount()
        # The texts that stand out, each with the amount that they are ordered by.
        self._listed: dict[str, list[tuple[float, dict[str, Any]]]] = {
            "least_supported": [],
            "least_attributed": [],
            "most_matching": [],
        }
        if self.where:
            # Refuses what the filter names and no text has, before the work.
            self.attribution().sources(where=dict(self.where))

    @property
    def identity(self) -> dict[str, str]:
        """What ties the files of this audit to its model, lens and least share."""
        least = f"{self.least_share:g}"
        return audit_identity(self.lens, self.options.method) | {"least_share": least}

    def read(
        self, documents: Iterable[Document], on_pass: OnPass | None = None
    ) -> Iterator[AuditedText]:
        """Yield one row per text, in order; afterwards, and on the way, the sums hold them.

        Args:
            documents: the texts.
            on_pass: is told of every forward pass; where it returns False, the reading ends there,
                without the texts that are not finished.

        Raises:
            DecompositionError: the parts of a logit do not sum to the model's own.
        """
        for of_text in read_texts(self._lm, documents, self.options, on_pass):
            row = self._row(of_text)
            self._add(of_text, row)
            yield row

    def attribution(self) -> Attribution:
        """Return what the predictions of all texts so far rely on."""
        return self._sum.result()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary: shares of all predictions, documents and the texts that stand out."""
        whole, meta, where = self.attribution(), self.lens.meta, dict(self.where)
        explained = self._median_explained()
        return {
            "model": self.model,
            "lens": str(self.lens.path),
            "corpus": {
                "name": meta.corpus_name,
                "fingerprint": meta.corpus,
                **{name: getattr(meta, name) for name in OF_A_LENS},
            },
            "method": self.options.method,
            "where": {column: list(values) for column, values in self.where},
            "least_share": self.least_share,
            "window": self.options.window,
            "stride": self.options.stride,
            "texts": self.texts,
            "tokens": self.tokens,
            "predictions": self.predictions,
            "ce": self._loss / self.predictions if self.predictions else None,
            "explained_share": explained,
            "notes": [] if explained is None or fits(explained) else [MISFIT],
            "shares": {by: whole.sources(by, where).to_dict() for by in GROUP_COLUMNS},
            "documents": [
                one.to_dict() | {"title": one.title, "url": one.url, "around": one.around}
                for one in whole.documents(DOCUMENTS_LISTED, where)
            ],
            "support": self._support.to_dict(),
            **{name: [entry for _, entry in rows] for name, rows in self._listed.items()},
        }

    def _row(self, of_text: TextFigures) -> AuditedText:
        found, count, where = of_text.attribution, len(of_text.losses), dict(self.where)
        named: list[DocumentShare] = []
        shares: list[float] = []
        if found is not None:
            shares = [item.share for item in found.sources("document", where).items]
            named = found.documents(sum(one >= self.least_share for one in shares), where)
        return AuditedText(
            text_id=of_text.document.doc_id,
            opening=of_text.document.opening[:OPENING_LISTED],
            tokens=of_text.tokens,
            predictions=count,
            ce=float(of_text.losses.mean(dtype=np.float64)) if count else None,
            explained_share=float(np.median(of_text.explained)) if count else None,
            shares=found and {by: found.sources(by, where) for by in GROUP_COLUMNS},
            documents=named,
            other_documents=float(sum(shares[len(named) :])),
            support=of_text.support,
        )

    def _add(self, of_text: TextFigures, row: AuditedText) -> None:
        self.texts += 1
        self.tokens += row.tokens
        self.predictions += row.predictions
        if of_text.attribution is None or row.shares is None:
            return
        self._loss += float(of_text.losses.sum(dtype=np.float64))
        self._sum.add(of_text.attribution)
        place = (np.nan_to_num(of_text.explained) - BINS_FROM) * (BINS / (BINS_TO - BINS_FROM))
        np.add.at(self._explained, place.clip(0, BINS - 1).astype(np.int64), 1)
        self._support.add(row.support)
        of_source = row.shares["source"]
        self._list("least_attributed", of_source.unattributed, row, share=of_source.unattributed)
        if self.where:
            matching = sum(item.share for item in of_source.items)
            self._list("most_matching", matching, row, share=matching)
        elif of_source.items:
            largest = of_source.items[0]
            self._list("most_matching", largest.share, row, share=largest.share, key=largest.key)
        if row.support is not None:
            level, score = row.support.level, row.support.score
            self._list("least_supported", -score, row, level=level, score=score)

    def _list(self, name: str, amount: float, row: AuditedText, **figures: Any) -> None:
        """Note a text among those with the largest amounts; of equal ones the earliest."""
        entry = {"text_id": row.text_id, "opening": row.opening} | figures
        rows = [*self._listed[name], (amount, entry)]
        self._listed[name] = sorted(rows, key=lambda one: -one[0])[:TEXTS_LISTED]

    def _median_explained(self) -> float | None:
        total = int(self._explained.sum())
        if not total:
            return None
        middle = int(np.searchsorted(np.cumsum(self._explained), (total + 1) // 2))
        return BINS_FROM + (middle + 0.5) * (BINS_TO - BINS_FROM) / BINS


def audit_identity(lens: Lens, method: Method) -> dict[str, str]:
    """Return what ties an audit's file to the model and lens it was made with."""
    meta = lens.meta
    return {
        "lens": key_of(meta.files),
        "prototypes": meta.prototypes,
        "corpus": meta.corpus,
        "method": method,
    }
