"""The prototypes of a lens, to be searched, listed and looked at one by one."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np

from prismlm.index.lens import Lens

CONTEXTS = 12
# Three bytes in a row are known by so many bits of a hash: a text of 3,000 bytes has one in twelve
# of these, so a word of six is looked for in few texts that do not have it.
TRIGRAM_BITS, TEXTS_AT_ONCE = 14, 2048
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
    def names(self) -> list[str]:
        """The names in lower case."""
        return [row["name"].lower() for row in self.rows]

    @cached_property
    def orders(self) -> dict[Sort, np.ndarray]:
        """The prototypes in every order that they can be listed in."""
        rows = self.rows
        scores = [-1.0 if row["label_score"] is None else row["label_score"] for row in rows]
        return {
            "usage": np.argsort([-row["usage"] for row in rows], kind="stable"),
            "score": np.argsort(-np.array(scores), kind="stable"),
            "name": np.array(sorted(range(len(rows)), key=self.names.__getitem__), dtype=np.int64),
            "id": np.arange(len(rows)),
        }

    @cached_property
    def trigrams(self) -> np.ndarray:
        """Which texts may have three bytes in a row: bits, packed along the texts, [2¹⁴, ⌈K/8⌉]."""
        parts: list[np.ndarray] = []
        for first in range(0, len(self.texts), TEXTS_AT_ONCE):
            texts = self.texts[first : first + TEXTS_AT_ONCE]
            owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
            found = np.zeros((1 << TRIGRAM_BITS, len(texts)), dtype=np.bool_)
            # Three bytes across two texts stand in neither, which costs a look at the first.
            found[_trigrams(b"".join(texts)), owners[:-2]] = True
            parts.append(np.packbits(found, axis=1))
        return np.concatenate(parts, axis=1)

    def search(self, query: str, sort: Sort) -> list[int]:
        """Return the prototypes whose text has every word of a query, in an order.

        Of the most used and the best named, those come first whose name has the words.
        """
        words = query.lower().split()
        found, texts = self._candidates(words, self.orders[sort]), self.texts
        # The longest is the rarest as a rule, and those after it look through what it left.
        for word in sorted(words, key=len, reverse=True):
            sought = word.encode(errors="replace")
            found = [n for n in found if sought in texts[n]]
        if not words or sort not in ("usage", "score"):
            return found
        named, names = found, self.names
        for word in words:
            named = [n for n in named if word in names[n]]
        first = set(named)
        return named + [n for n in found if n not in first]

    def _candidates(self, words: list[str], order: np.ndarray) -> list[int]:
        """Return, in an order, the prototypes whose text has the trigrams of all words."""
        sought = np.concatenate([_trigrams(word.encode(errors="replace")) for word in ("", *words)])
        if not len(sought):
            return order.tolist()
        rows = np.bitwise_and.reduce(self.trigrams[np.unique(sought)], axis=0)
        return order[np.unpackbits(rows, count=len(order)).astype(np.bool_)[order]].tolist()

    def of_category(self, found: list[int], category: str) -> list[int]:
        """Return those of a category, or all where none is named."""
        return [n for n in found if self.lens.categories[n] == category] if category else found

    def row(self, number: int) -> dict[str, Any]:
        """Return what a list says of a prototype."""
        row, names = self.rows[number], ("name", "description", "category", "usage")
        own = {name: row[name] for name in names}
        return {"id": number, **own, "score": row["label_score"]}

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


def _trigrams(text: bytes) -> np.ndarray:
    """Return the hash of each three bytes in a row."""
    read = np.frombuffer(text, dtype=np.uint8).astype(np.uint32)
    joined = (read[:-2] << 16) | (read[1:-1] << 8) | read[2:]
    return (joined * np.uint32(2654435761)) >> np.uint32(32 - TRIGRAM_BITS)
