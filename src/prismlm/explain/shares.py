"""Shares of the training text in predictions, as plain values, and sums by number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from prismlm.errors import InputError, suggest
from prismlm.index.layout import GROUP_COLUMNS
from prismlm.index.where import Conditions

Method = Literal["evidence", "source"]
METHODS: tuple[str, ...] = get_args(Method)
COLUMNS = ("document", *GROUP_COLUMNS)


@dataclass(frozen=True)
class Share:
    """One source and its share."""

    key: str
    share: float


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
        items = [{"key": item.key, "share": item.share} for item in self.items]
        value: dict[str, Any] = {"by": self.by, "items": items, "unattributed": self.unattributed}
        if self.where:
            value["elsewhere"] = self.elsewhere
            value["where"] = {column: list(values) for column, values in self.where}
        if self.method != "evidence":
            value["method"] = self.method
        return value


@dataclass(frozen=True)
class DocumentShare:
    """A document, its share, and the place in it that most resembles what is explained."""

    doc_id: str
    share: float
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    before: str | None
    token: str | None
    after: str | None
    position: int

    @property
    def text(self) -> str | None:
        """The text around the place, or None if the index was built without text."""
        return None if self.token is None else f"{self.before}{self.token}{self.after}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        return {
            "doc_id": self.doc_id,
            "share": self.share,
            "source": self.source,
            "license": self.license,
            "text": self.text,
            "position": self.position,
        }


class Sums(NamedTuple):
    """Amounts by number: distinct ids ascending, int64 [n], and float64 [n]."""

    ids: np.ndarray
    values: np.ndarray


def add_up(parts: Iterable[Sums]) -> Sums:
    """Return the sums over all parts, id by id."""
    listed = list(parts)
    if not listed:
        return Sums(np.empty(0, dtype=np.int64), np.empty(0))
    ids, place = np.unique(np.concatenate([part.ids for part in listed]), return_inverse=True)
    values = np.concatenate([part.values for part in listed])
    return Sums(ids, np.bincount(place, values, minlength=len(ids)))


def check_by(by: str) -> None:
    """Raise InputError unless shares can be taken by this column."""
    known: list[str] = list(COLUMNS)
    if by not in known:
        raise InputError(
            f"shares can be taken by {', '.join(known[:-1])} or {known[-1]}; not by {by!r}."
            f"{suggest(by, known)}"
        )


def check_method(method: str) -> None:
    """Raise InputError unless there is such a method."""
    if method not in METHODS:
        raise InputError(
            f"there is no method {method!r}: expected {' or '.join(METHODS)}."
            f"{suggest(method, list(METHODS))}"
        )
