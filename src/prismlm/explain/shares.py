"""Shares of the training text in predictions, as plain values, and sums by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from prismlm.errors import check_choice
from prismlm.explain.rows import frame, table
from prismlm.index.around import Around
from prismlm.index.layout import GROUP_COLUMNS
from prismlm.index.where import Conditions, Where, normalised

if TYPE_CHECKING:
    import pandas

    from prismlm.index.lens import Lens

Method = Literal["evidence", "source"]
METHODS: tuple[str, ...] = get_args(Method)
COLUMNS = ("document", *GROUP_COLUMNS)
# Of documents that carry at least so much of an answer, most are about its subject; of those that
# carry less, few (docs/results/asked.md).
WORTH_SHOWING = 0.03


@dataclass(frozen=True)
class Share:
    """One source, its share, and its share of all positions of the corpus, where that is known."""

    key: str
    share: float
    base_rate: float | None = None

    @property
    def lift(self) -> float | None:
        """How many times its base rate the share is."""
        return self.share / self.base_rate if self.base_rate else None

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"key", "share"}``; with ``base_rate`` and ``lift`` where they are known."""
        value: dict[str, Any] = {"key": self.key, "share": self.share}
        if self.base_rate is not None:
            value |= {"base_rate": self.base_rate, "lift": self.lift}
        return value


@dataclass(frozen=True)
class Sources:
    """Shares by one column, largest first; items, ``elsewhere`` and ``unattributed`` sum to 1.

    Attributes:
        by: the column.
        items: the keys; where a filter was given, of the text that matches it.
        unattributed: what no training text stands behind.
        elsewhere: the share of text that does not match the filter; 0 without one.
        where: the filter.
        method: how it was taken.
    """

    by: str
    items: tuple[Share, ...]
    unattributed: float
    elsewhere: float = 0.0
    where: Conditions = ()
    method: Method = "evidence"

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"by", "items": [{"key", "share"}…], "unattributed"}``.

        With a filter, ``elsewhere`` and ``where`` too; ``method`` where it is not the default.
        """
        items = [item.to_dict() for item in self.items]
        value: dict[str, Any] = {"by": self.by, "items": items, "unattributed": self.unattributed}
        if self.where:
            value["elsewhere"] = self.elsewhere
            value["where"] = {column: list(values) for column, values in self.where}
        if self.method != "evidence":
            value["method"] = self.method
        return value

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per key, and what is left as further rows: shares sum to 1."""
        return frame(self._rows())

    def _repr_html_(self) -> str:
        return table(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rest = {"elsewhere": self.elsewhere, "unattributed": self.unattributed}
        rows = [
            {self.by: one.key, "share": one.share, "base_rate": one.base_rate, "lift": one.lift}
            for one in self.items
        ]
        return rows + [
            {self.by: key, "share": share, "base_rate": None, "lift": None}
            for key, share in rest.items()
            if share or key == "unattributed"
        ]


@dataclass(frozen=True)
class DocumentShare:
    """A document, its share, and the place in it that most resembles what is explained.

    Attributes:
        doc_id, source, domain, license, title, url: the document.
        share: of it.
        position: the place, as a global position of the corpus.
        read: gives the text there; it is called when that is first looked at.
    """

    doc_id: str
    share: float
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    position: int
    read: Callable[[], Around | None] = field(repr=False, compare=False)

    @cached_property
    def around(self) -> Around | None:
        """The text around the place, with the token that it is marked by; None without text."""
        return self.read()

    @property
    def text(self) -> str | None:
        """The text around the place, or None where there is none at hand."""
        return None if self.around is None else str(self.around)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        names = ("doc_id", "share", "source", "license", "text", "position")
        return {name: getattr(self, name) for name in names}


def worth_showing(documents: Sequence[DocumentShare]) -> list[DocumentShare]:
    """Return the documents, largest share first, whose share is worth a reader's minute.

    That is at least 3 %; where the evidence is spread so thin that the first has under 6 %, at
    least half of the first's.
    """
    least = min(WORTH_SHOWING, documents[0].share / 2) if documents else 0.0
    return [document for document in documents if document.share >= least]


class Sums(NamedTuple):
    """Amounts by number: distinct ids ascending, int64 [n], and float64 [n]."""

    ids: np.ndarray
    values: np.ndarray


class Grouped(NamedTuple):
    """Amounts by the keys of a column.

    Attributes:
        names: of the keys.
        sums: of the keys that match the filter.
        elsewhere: what falls on the others.
        unattributed: what falls on no text.
        base_rates: the share of each key in all positions of the corpus, or None.
    """

    names: list[str]
    sums: Sums
    elsewhere: float
    unattributed: float
    base_rates: np.ndarray | None


class Attribution(ABC):
    """What a set of positions relies on, before it is grouped. Sets without overlap add up.

    Attributes:
        lens: the lens that the numbers belong to.
        method: how they were taken.
    """

    lens: Lens
    method: Method

    @property
    @abstractmethod
    def total(self) -> float:
        """What shares are shares of."""

    @abstractmethod
    def grouped(self, by: str, conditions: Conditions) -> Grouped:
        """Return the amounts by the keys of a column, with a filter."""

    @abstractmethod
    def documents(self, limit: int = 10, where: Where | None = None) -> list[DocumentShare]:
        """Return the documents with the largest shares, each with its weightiest place.

        Raises:
            InputError: the filter names what is not there.
        """

    @abstractmethod
    def document_share(self, doc_id: str) -> float:
        """Return the share of one document; 0 where there is none of this id."""

    def sources(self, by: str = "source", where: Where | None = None) -> Sources:
        """Return shares by source, domain, license or document.

        Raises:
            InputError: ``by`` is none of those, or the filter names what is not there.
        """
        check_choice("what shares are taken by", by, COLUMNS)
        conditions = normalised(where)
        names, sums, elsewhere, unattributed, rates = self.grouped(by, conditions)
        total = self.total
        if total <= 0:
            return Sources(by, (), 1.0, 0.0, conditions, self.method)
        order = np.argsort(-sums.values, kind="stable")
        items = tuple(
            Share(names[code], value / total, None if rates is None else float(rates[code]))
            for code, value in zip(
                sums.ids[order].tolist(), sums.values[order].tolist(), strict=True
            )
            if value > 0
        )
        return Sources(by, items, unattributed / total, elsewhere / total, conditions, self.method)


def sums_by_key(codes: np.ndarray, values: np.ndarray, count: int) -> Sums:
    """Return the sums of values by their codes, of ``count`` keys."""
    # Sorting pays where there are many more keys than amounts, as with documents.
    if count > len(codes):
        return add_up([Sums(codes, values)])
    return Sums(np.arange(count), np.bincount(codes, values, minlength=count))


def add_up(parts: Iterable[Sums]) -> Sums:
    """Return the sums over all parts, id by id."""
    listed = list(parts)
    if not listed:
        return Sums(np.empty(0, dtype=np.int64), np.empty(0))
    ids, place = np.unique(np.concatenate([part.ids for part in listed]), return_inverse=True)
    values = np.concatenate([part.values for part in listed])
    return Sums(ids, np.bincount(place, values, minlength=len(ids)))


def check_method(method: str) -> None:
    """Raise InputError unless there is such a method."""
    check_choice("the method", method, METHODS)
