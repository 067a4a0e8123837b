"""What an attribution gives, as plain values: shares of sources, documents and passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from prismlm.explain.rows import frame, table
from prismlm.lens.text import Around
from prismlm.lens.where import Conditions

if TYPE_CHECKING:
    import pandas

Method = Literal["evidence", "source"]
METHODS: tuple[str, ...] = get_args(Method)
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
        rest = [Share("elsewhere", self.elsewhere)] if self.elsewhere else []
        return [
            {self.by: one.key, "share": one.share, "base_rate": one.base_rate, "lift": one.lift}
            for one in (*self.items, *rest, Share("unattributed", self.unattributed))
        ]


@dataclass(frozen=True)
class DocumentShare:
    """A document, its share, and the place in it that most resembles what is explained.

    Attributes:
        doc_id, source, domain, license, title, url: the document.
        share: of it.
        position: the place, as a global position of the corpus.
        read: gives the text there when it is first looked at.
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


@dataclass(frozen=True)
class Passage(DocumentShare):
    """A stretch of a document that carries predictions; ``position`` is of its marked token.

    The marked token is the predicted one, where it weighs most; ``around`` is its sentence.

    Attributes:
        cosine: of the hidden state before the marked token to that of the prediction.
        length: tokens from the first place to the last.
        for_or_against: whether it speaks for the predictions.
        predicted: of what speaks against: the predicted token that did not come next there.
        probability: that the model gave to this token there.
    """

    cosine: float = 0.0
    length: int = 1
    for_or_against: Literal["for", "against"] = "for"
    predicted: str | None = None
    probability: float | None = None
    read_also: Callable[[], list[tuple[int, int]]] = field(default=list, repr=False, compare=False)

    @cached_property
    def also(self) -> list[tuple[int, int]]:
        """Where other tokens that carry predictions lie in ``text``; adjacent ones are joined."""
        return self.read_also()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``."""
        value = super().to_dict() | {
            "domain": self.domain,
            "title": self.title,
            "url": self.url,
            "token": None if self.around is None else self.around.token,
            "also": [list(span) for span in self.also],
            "cosine": self.cosine,
            "for_or_against": self.for_or_against,
        }
        if self.for_or_against == "against":
            value |= {"predicted": self.predicted, "probability": self.probability}
        return value


def worth_showing(documents: Sequence[DocumentShare]) -> list[DocumentShare]:
    """Return the documents, largest share first, whose share is worth a reader's minute.

    That is at least 3 %; where the evidence is spread so thin that the first has under 6 %, at
    least half of the first's.
    """
    least = min(WORTH_SHOWING, documents[0].share / 2) if documents else 0.0
    return [document for document in documents if document.share >= least]
