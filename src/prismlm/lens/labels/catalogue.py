"""The prototypes of a lens, to be searched, listed and looked at one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from prismlm.lens.lens import Lens

# Contexts of each prototype that are searched, and shown on its card.
CONTEXTS = 12
Sort = Literal["text", "usage", "score", "name", "id"]


class Catalogue:
    """The prototypes of a lens, with their texts and orders computed on first use."""

    def __init__(self, lens: Lens) -> None:
        self.lens, self._meta = lens, lens.meta

    def current(self) -> Catalogue:
        """Return it, or one of names that were written since; StaleLensError for another lens."""
        self.lens.check_unchanged()
        return self if self._meta is self.lens.meta else Catalogue(self.lens)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table of prototypes."""
        return self.lens.prototypes.to_pylist()

    @cached_property
    def texts(self) -> list[str]:
        """The text that is searched: number, name, description, tokens, contexts; in lower case."""
        index, first = self.lens.index, self.lens.first_rows.tolist()
        columns = (index[name].fill_null("").to_pylist() for name in ("before", "token", "after"))
        contexts = list(map("".join, zip(*columns, strict=True)))
        texts: list[str] = []
        for n, row in enumerate(self.rows):
            head = f"#{n} {row['name']} {row['description'] or ''}"
            shown = contexts[first[n] : min(first[n] + CONTEXTS, first[n + 1])]
            texts.append(" ".join((head, *row["top_tokens"], *shown)).lower())
        return texts

    @cached_property
    def orders(self) -> dict[Sort, np.ndarray]:
        """The prototypes in each order that they can be listed in."""
        by_size, table = self.lens.by_size, self.lens.prototypes
        scores = table["label_score"].fill_null(-1.0).to_numpy()
        names = [name.lower() for name in self.lens.names]
        return {
            "text": by_size,
            "usage": np.argsort(-table["usage"].to_numpy(), kind="stable"),
            # Many have a perfect score, often on few passages: larger cells come first.
            "score": by_size[np.argsort(-scores[by_size], kind="stable")],
            "name": np.array(sorted(range(len(names)), key=names.__getitem__), np.int64),
            "id": np.arange(len(names)),
        }

    def search(self, query: str, sort: Sort, everything: bool = False) -> np.ndarray:
        """Return the prototypes whose text has every word of a query, in an order, int64.

        Prototypes outside :attr:`Lens.listed` are included only with ``everything``. In an order by
        a figure, those whose name has the words come first.
        """
        words, order = query.lower().split(), self.orders[sort]
        order = order if everything else order[self.lens.listed[order]]
        if not words:
            return order
        matches = order[_contain(self.texts, words)[order]]
        if sort in ("name", "id"):
            return matches
        named = _contain([name.lower() for name in self.lens.names], words)[matches]
        return np.concatenate((matches[named], matches[~named]))

    def of_category(self, prototypes: np.ndarray, category: str) -> np.ndarray:
        """Return those of a category, or all if it is empty."""
        return prototypes[self._categories[prototypes] == category] if category else prototypes

    def counted(self, prototypes: np.ndarray) -> dict[str, int]:
        """Return how many of some prototypes are of each category, in alphabetical order."""
        return dict(sorted(Counter(filter(None, self._categories[prototypes])).items()))

    @cached_property
    def _categories(self) -> np.ndarray:
        return np.array(self.lens.categories, object)

    def row(self, number: int) -> dict[str, Any]:
        """Return the figures of a prototype in a list."""
        row, names = self.rows[number], ("name", "description", "category", "usage")
        shown = {name: row[name] for name in names}
        positions = int(self.lens.cell_sizes[number])
        return {"id": number, **shown, "positions": positions, "score": row["label_score"]}

    def card(self, number: int) -> dict[str, Any]:
        """Return everything about a prototype."""
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


def _contain(texts: Sequence[str], words: Sequence[str]) -> np.ndarray:
    """Return which texts contain all of some words, bool [texts]."""
    return np.array([all(word in text for word in words) for text in texts], bool)
