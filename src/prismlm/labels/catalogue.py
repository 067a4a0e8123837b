"""The prototypes of a lens, to be searched, listed and looked at one by one."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np

from prismlm.index.lens import Lens

CONTEXTS = 12
PARTS = ("before", "token", "after")
Sort = Literal["usage", "score", "name", "id"]


class Catalogue:
    """The prototypes of a lens, ready to be searched.

    Args:
        lens: theirs.
    """

    def __init__(self, lens: Lens) -> None:
        self.lens = lens

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row of the table for each prototype."""
        return self.lens.prototypes.to_pylist()

    @cached_property
    def texts(self) -> list[bytes]:
        """What is searched: number, name, description, tokens and contexts, in lower case.

        As UTF-8, which is searched in half the time: a single arrow makes a text twice as wide.
        """
        contexts = [""] * self.lens.num_prototypes
        columns = (self.lens.index[name].to_pylist() for name in ("prototype", "rank", *PARTS))
        for prototype, rank, *words in zip(*columns, strict=True):
            if rank < CONTEXTS:
                contexts[prototype] += " " + "".join(word or "" for word in words)
        return [
            " ".join(
                (f"#{n}", row["name"], row["description"] or "", *row["top_tokens"], contexts[n])
            )
            .lower()
            .encode(errors="replace")
            for n, row in enumerate(self.rows)
        ]

    @cached_property
    def orders(self) -> dict[Sort, np.ndarray]:
        """The prototypes in every order that they can be listed in."""
        rows = self.rows
        scores = [-1.0 if row["label_score"] is None else row["label_score"] for row in rows]
        names = [row["name"].lower() for row in rows]
        return {
            "usage": np.argsort([-row["usage"] for row in rows], kind="stable"),
            "score": np.argsort(-np.array(scores), kind="stable"),
            "name": np.array(sorted(range(len(rows)), key=names.__getitem__), dtype=np.int64),
            "id": np.arange(len(rows)),
        }

    def search(self, query: str, sort: Sort) -> list[int]:
        """Return the prototypes whose text has every word of a query, in an order.

        Of the most used and the best named, those come first whose name has the words.
        """
        found: list[int] = self.orders[sort].tolist()
        words = query.lower().split()
        # The longest is the rarest as a rule, and those after it look through what it left.
        for word in sorted(words, key=len, reverse=True):
            sought = word.encode(errors="replace")
            found = [n for n in found if sought in self.texts[n]]
        if words and sort in ("usage", "score"):
            names = {n: self.rows[n]["name"].lower() for n in found}
            found.sort(key=lambda n: not all(word in names[n] for word in words))
        return found

    def of_category(self, found: list[int], category: str) -> list[int]:
        """Return those of a category, or all where none is named."""
        return [n for n in found if self.lens.categories[n] == category] if category else found

    def row(self, number: int) -> dict[str, Any]:
        """Return what a list says of a prototype."""
        row = self.rows[number]
        return {
            "id": number,
            "name": row["name"],
            "description": row["description"],
            "category": row["category"],
            "usage": row["usage"],
            "score": row["label_score"],
        }

    def card(self, number: int) -> dict[str, Any]:
        """Return all that is known of a prototype.

        Raises:
            InputError: there is no such prototype.
        """
        places = self.lens.rows_of(number)
        count = min(CONTEXTS, places.stop - places.start)
        row = self.rows[number]
        return self.row(number) | {
            "role": row["role"],
            "tags": row["tags"] or [],
            "label_source": row["label_source"],
            "nearest_cosine": row["nearest_cosine"],
            "tokens": list(zip(row["top_tokens"], row["top_values"], strict=True)),
            "contexts": self.lens.index.slice(places.start, count).to_pylist(),
        }
