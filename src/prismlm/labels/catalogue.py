"""The prototypes of a lens, to be searched, listed and looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from prismlm.index.lens import Lens

CONTEXTS = 12
# Of the words that have some letters, how many are looked up before it is asked whether all texts
# are found.
FIRST_WORDS = (16, 256)
PARTS = ("before", "token", "after")
Sort = Literal["text", "usage", "score", "name", "id"]


class WordIndex:
    """Finds texts that have some letters in a row, through the words that have them.

    Args:
        texts: to be searched; a word is what stands between white space.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        read = pa.array([text.encode(errors="replace") for text in texts], pa.large_string())
        # PyArrow's functions are made while it is imported, unknown to a type checker.
        split = getattr(pc, "utf8_split_whitespace")(read)  # noqa: B009
        words = split.flatten().dictionary_encode()
        # Copied: SciPy sorts them in place.
        places = np.array(words.indices), np.array(split.offsets)
        shape = len(texts), len(words.dictionary)
        of_texts: Any = sparse.csr_matrix((np.ones(len(words), dtype=np.bool_), *places), shape)
        of_texts.sum_duplicates()
        by_word: Any = sparse.csr_matrix(of_texts.T)
        # The words that most texts have come first: these alone may be of all texts.
        order = np.argsort(-np.diff(by_word.indptr), kind="stable")
        self._texts: Any = by_word[order]
        known: list[bytes] = words.dictionary.take(order).cast(pa.large_binary()).to_pylist()
        self._letters = np.frombuffer(b"\n".join(known), dtype=np.uint8)
        self._owners = np.repeat(np.arange(len(known)), [len(word) + 1 for word in known])
        self._places = np.argsort(self._letters, kind="stable").astype(np.int32)
        self._starts = np.searchsorted(self._letters[self._places], np.arange(257))

    def having(self, letters: str) -> np.ndarray:
        """Return which texts have ``letters``, without white space, in a word: bool [texts]."""
        sought = np.frombuffer(letters.encode(errors="replace"), dtype=np.uint8)
        # From the letter that is there least.
        rare = int(np.argmin(np.diff(self._starts)[sought]))
        places = self._places[self._starts[sought[rare]] : self._starts[sought[rare] + 1]] - rare
        places = places[(places >= 0) & (places <= len(self._letters) - len(sought))]
        for offset, letter in enumerate(sought):
            places = places[self._letters[places + offset] == letter]
        has = np.zeros(self._texts.shape[0], dtype=np.bool_)
        has[self._owners[places]] = True
        found = np.zeros(self._texts.shape[1], dtype=np.bool_)
        for words in np.split(np.flatnonzero(has), FIRST_WORDS):
            found[self._texts[words].indices] = True
            if found.all():
                break
        return found


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

    def texts(self) -> list[str]:
        """Return what is searched: number, name, description, tokens and contexts, in lower case.

        Of all contexts, which takes a while.
        """
        contexts = [""] * self.lens.num_prototypes
        columns = (self.lens.index[name].to_pylist() for name in ("prototype", "rank", *PARTS))
        for prototype, rank, *words in zip(*columns, strict=True):
            if rank < CONTEXTS:
                contexts[prototype] += " " + "".join(word or "" for word in words)
        return [
            " ".join(
                (f"#{n}", row["name"], row["description"] or "", *row["top_tokens"], contexts[n])
            ).lower()
            for n, row in enumerate(self.rows)
        ]

    @cached_property
    def words(self) -> WordIndex:
        """The words of all texts."""
        return WordIndex(self.texts())

    @property
    def read(self) -> bool:
        """Whether all texts have been read, and a search waits for nothing."""
        return "words" in vars(self)

    @cached_property
    def named(self) -> WordIndex:
        """The words of all names."""
        return WordIndex([row["name"].lower() for row in self.rows])

    @cached_property
    def categories(self) -> tuple[np.ndarray, np.ndarray]:
        """The categories, "" for none, and the number of every prototype's."""
        return np.unique([one or "" for one in self.lens.categories], return_inverse=True)

    @cached_property
    def orders(self) -> dict[Sort, np.ndarray]:
        """The prototypes in every order that they can be listed in."""
        rows = self.rows
        scores = [-1.0 if row["label_score"] is None else row["label_score"] for row in rows]
        used = np.array([row["usage"] for row in rows])
        leading = self.lens.leading
        return {
            "text": leading,
            "usage": np.argsort(-used, kind="stable"),
            # Hundreds have all passages right, often of very few: those with most come first.
            "score": leading[np.argsort(-np.array(scores)[leading], kind="stable")],
            "name": np.array(
                sorted(range(len(rows)), key=lambda n: rows[n]["name"].lower()), dtype=np.int64
            ),
            "id": np.arange(len(rows)),
        }

    def search(self, query: str, sort: Sort, everything: bool = False) -> np.ndarray:
        """Return the prototypes whose text has every word of a query, in an order, int64.

        Those that :attr:`Lens.listed` leaves out only with ``everything``.

        Of an order by a figure, those come first whose name has the words.
        """
        words, order = query.lower().split(), self.orders[sort]
        order = order if everything else order[self.lens.listed[order]]
        if not words:
            return order
        found = order[self._having(self.words, words)[order]]
        if sort in ("name", "id"):
            return found
        named = self._having(self.named, words)[found]
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

    @staticmethod
    def _having(index: WordIndex, words: Sequence[str]) -> np.ndarray:
        return np.logical_and.reduce([index.having(word) for word in words])

    def row(self, number: int) -> dict[str, Any]:
        """Return what a list says of a prototype."""
        row, names = self.rows[number], ("name", "description", "category", "usage")
        own = {name: row[name] for name in names}
        sizes = self.lens.cell_sizes
        positions = None if sizes is None else int(sizes[number])
        return {"id": number, **own, "positions": positions, "score": row["label_score"]}

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
