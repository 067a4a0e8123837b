"""What a model's predictions over many texts rely on: one row per text, and sums over all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.explain.attribution import sum_of
from prismlm.explain.shares import Attribution, DocumentShare, Method, Sources
from prismlm.explain.summary import fits
from prismlm.explain.support import Support, SupportCount
from prismlm.explain.texts import OnPass, TextFigures, TextOptions, read_texts
from prismlm.index.layout import GROUP_COLUMNS, key_of
from prismlm.index.lens import Lens
from prismlm.index.where import Conditions, Where, normalised

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
        support: how well the corpus supports the text; None without cells.
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

    @property
    def matching(self) -> float | None:
        """The share of text that matches the filter; of all text, without one."""
        if self.shares is None:
            return None
        return sum(item.share for item in self.shares["source"].items)

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the report."""
        row: dict[str, Any] = {name: getattr(self, name) for name in FIGURES}
        row["opening"] = self.opening[:OPENING]
        row["support"] = None if self.support is None else self.support.level
        row["support_score"] = None if self.support is None else self.support.score
        for column in GROUP_COLUMNS:
            items = () if self.shares is None else self.shares[column].items
            row[f"by_{column}"] = [
                {"key": item.key, "share": item.share} for item in items[:KEYS_KEPT]
            ]
            row[f"other_{column}"] = sum(item.share for item in items[KEYS_KEPT:])
        row["documents"] = [
            {
                key: getattr(document, key)
                for key in ("doc_id", "share", "source", "domain", "license", "title", "position")
            }
            for document in self.documents
        ]
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
        self._sum = sum_of(self.lens, options.method)
        self._least_attributed = _Largest()
        self._most_matching = _Largest()
        self._support, self._least_supported = SupportCount(), _Largest()
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
            yield self._add(of_text)

    def attribution(self) -> Attribution:
        """Return what the predictions of all texts so far rely on."""
        return self._sum.result()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary: shares of all predictions, documents and the texts that stand out."""
        whole = self.attribution()
        meta = self.lens.meta
        documents = whole.documents(DOCUMENTS_LISTED, dict(self.where))
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
            "shares": {by: whole.sources(by, dict(self.where)).to_dict() for by in GROUP_COLUMNS},
            "documents": [
                document.to_dict()
                | {"title": document.title, "url": document.url, "around": document.around}
                for document in documents
            ],
            "support": self._support.to_dict(),
            "least_supported": self._least_supported.listed,
            "least_attributed": self._least_attributed.listed,
            "most_matching": self._most_matching.listed,
        }

    def _add(self, of_text: TextFigures) -> AuditedText:
        found, count = of_text.attribution, len(of_text.losses)
        named, others = self._named(found)
        row = AuditedText(
            text_id=of_text.document.doc_id,
            opening=of_text.document.opening[:OPENING_LISTED],
            tokens=of_text.tokens,
            predictions=count,
            ce=float(of_text.losses.mean(dtype=np.float64)) if count else None,
            explained_share=float(np.median(of_text.explained)) if count else None,
            shares=found and {by: found.sources(by, dict(self.where)) for by in GROUP_COLUMNS},
            documents=named,
            other_documents=others,
            support=of_text.support,
        )
        self.texts += 1
        self.tokens += of_text.tokens
        self.predictions += count
        if found is None:
            return row
        self._loss += float(of_text.losses.sum(dtype=np.float64))
        self._sum.add(found)  # pyright: ignore[reportArgumentType] - both are of one lens and method
        place = (np.nan_to_num(of_text.explained) - BINS_FROM) * (BINS / (BINS_TO - BINS_FROM))
        np.add.at(self._explained, place.clip(0, BINS - 1).astype(np.int64), 1)
        self._list(row)
        return row

    def _list(self, row: AuditedText) -> None:
        """Note a text where it stands out."""
        unattributed, matching = row.unattributed or 0.0, row.matching or 0.0
        self._least_attributed.add(unattributed, row, share=unattributed)
        if self.where:
            self._most_matching.add(matching, row, share=matching)
        else:
            assert row.shares is not None
            for item in row.shares["source"].items[:1]:
                self._most_matching.add(item.share, row, share=item.share, key=item.key)
        self._support.add(row.support)
        if row.support is not None:
            level, score = row.support.level, row.support.score
            self._least_supported.add(-score, row, level=level, score=score)

    def _named(self, found: Attribution | None) -> tuple[list[DocumentShare], float]:
        """Return the documents that a row names, and what the others come to."""
        if found is None:
            return [], 0.0
        where = dict(self.where)
        shares = [item.share for item in found.sources("document", where).items]
        count = sum(share >= self.least_share for share in shares)
        return found.documents(count, where) if count else [], float(sum(shares[count:]))

    def _median_explained(self) -> float | None:
        total = int(self._explained.sum())
        if not total:
            return None
        middle = int(np.searchsorted(np.cumsum(self._explained), (total + 1) // 2))
        return BINS_FROM + (middle + 0.5) * (BINS_TO - BINS_FROM) / BINS


class _Largest:
    """The texts with the largest amounts; of equal ones the earliest."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._amounts: list[float] = []

    def add(self, amount: float, row: AuditedText, **figures: Any) -> None:
        place = bisect_right(self._amounts, -amount)
        if place < TEXTS_LISTED:
            entry = {"text_id": row.text_id, "opening": row.opening} | figures
            self._amounts.insert(place, -amount)
            self.listed.insert(place, entry)
            del self._amounts[TEXTS_LISTED:], self.listed[TEXTS_LISTED:]


def audit_identity(lens: Lens, method: Method) -> dict[str, str]:
    """Return what ties an audit's file to the model and lens it was made with."""
    meta = lens.meta
    return {
        "lens": key_of(meta.files),
        "prototypes": meta.prototypes,
        "corpus": meta.corpus,
        "method": method,
    }
