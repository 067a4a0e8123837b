"""The prototypes of a lens, to be searched, listed and looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from prismlm.lens.lens import Lens

CONTEXTS = 12
Sort = Literal["text", "usage", "score", "name", "id"]


class Catalogue:
    """The prototypes of a lens, ready to be searched."""

    def __init__(self, lens: Lens) -> None:
        self.lens = lens

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row of the table for each prototype."""
        return self.lens.prototypes.to_pylist()

    @cached_property
    def texts(self) -> list[str]:
        """What is searched: number, name, description, tokens and contexts, in lower case.

        Of all contexts, which takes a while.
        """
        index, first = self.lens.index, self.lens.first_rows.tolist()
        columns = (index[name].fill_null("").to_pylist() for name in ("before", "token", "after"))
        contexts = list(map("".join, zip(*columns, strict=True)))
        texts: list[str] = []
        for n, row in enumerate(self.rows):
            said = f"#{n} {row['name']} {row['description'] or ''}"
            shown = contexts[first[n] : min(first[n] + CONTEXTS, first[n + 1])]
            texts.append(" ".join((said, *row["top_tokens"], *shown)).lower())
        return texts

    @property
    def read(self) -> bool:
        """Whether all texts have been read, and a search waits for nothing."""
        return "texts" in vars(self)

    @cached_property
    def categories(self) -> tuple[np.ndarray, np.ndarray]:
        """The categories, "" for none, and the number of every prototype's."""
        return np.unique([one or "" for one in self.lens.categories], return_inverse=True)

    @cached_property
    def orders(self) -> dict[Sort, np.ndarray]:
        """The prototypes in every order that they can be listed in."""
        leading, table = self.lens.leading, self.lens.prototypes
        scores = table["label_score"].fill_null(-1.0).to_numpy()
        names = [name.lower() for name in self.lens.names]
        return {
            "text": leading,
            "usage": np.argsort(-table["usage"].to_numpy(), kind="stable"),
            # Hundreds have all passages right, often of very few: those with most come first.
            "score": leading[np.argsort(-scores[leading], kind="stable")],
            "name": np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64),
            "id": np.arange(len(names)),
        }

    def search(self, query: str, sort: Sort, everything: bool = False) -> np.ndarray:
        """Return the prototypes whose text has every word of a query, in an order, int64.

        Those that :attr:`Lens.listed` leaves out only with ``everything``. Of an order by a figure,
        those come first whose name has the words.
        """
        words, order = query.lower().split(), self.orders[sort]
        order = order if everything else order[self.lens.listed[order]]
        if not words:
            return order
        found = order[_having(self.texts, words)[order]]
        if sort in ("name", "id"):
            return found
        named = _having([name.lower() for name in self.lens.names], words)[found]
        return np.concatenate((found[named], found[~named]))

    def of_category(self, found: np.ndarray, category: str) -> np.ndarray:
        """Return those of a category, or all where none is named."""
        names, numbers = self.categories
        return found[(names == category)[numbers[found]]] if category else found

    def counted(self, found: np.ndarray) -> dict[str, int]:
        """Return how many of some prototypes are of each category."""
        names, numbers = self.categories
        counts = np.bincount(numbers[found], minlength=len(names))
        pairs = zip(names.tolist(), counts.tolist(), strict=True)
        return {name: count for name, count in pairs if name and count}

    def row(self, number: int) -> dict[str, Any]:
        """Return what a list says of a prototype."""
        row, names = self.rows[number], ("name", "description", "category", "usage")
        own = {name: row[name] for name in names}
        positions = int(self.lens.cell_sizes[number])
        return {"id": number, **own, "positions": positions, "score": row["label_score"]}

    def card(self, number: int) -> dict[str, Any]:
        """Return all that is known of a prototype."""
        contexts = self.lens.rows_of(number)
        row = self.rows[number]
        count = min(CONTEXTS, contexts.stop - contexts.start)
        return self.row(number) | {
            "role": row["role"],
            "tags": row["tags"] or [],
            "label_source": row["label_source"],
            "nearest_cosine": row["nearest_cosine"],
            "tokens": list(zip(row["top_tokens"], row["top_values"], strict=True)),
            "contexts": self.lens.index.slice(contexts.start, count).to_pylist(),
        }


def _having(texts: Sequence[str], words: Sequence[str]) -> np.ndarray:
    """Return which texts have all of some words, whole or in part: bool [texts]."""
    return np.array([all(word in text for word in words) for text in texts], bool)
