"""Filters on the text behind a prediction, by source, domain and licence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from prismlm.errors import InputError, check_choice, check_kind, check_text
from prismlm.lens.layout import GROUP_COLUMNS

UNKNOWN = "(unknown)"
# Values of one column are alternatives; columns must all match.
Where = Mapping[str, str | Sequence[str]]
Conditions = tuple[tuple[str, tuple[str, ...]], ...]


class Keys(NamedTuple):
    """The distinct values of a column, and the index of every row's value, int [rows]."""

    names: list[str]
    codes: np.ndarray

    @classmethod
    def from_column(cls, column: pa.ChunkedArray) -> Keys:
        """Encode a column of a table; nulls are "(unknown)"."""
        encoded = column.fill_null(UNKNOWN).combine_chunks().dictionary_encode()
        return cls(encoded.dictionary.to_pylist(), encoded.indices.to_numpy())


def parse_where(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``column=value`` conditions; several values of one column are alternatives."""
    where: dict[str, list[str]] = {}
    for condition in conditions:
        column, _, value = condition.partition("=")
        if not value:
            raise InputError(
                f"the filter {condition!r} cannot be read: expected COLUMN=VALUE, such as "
                "license=CC0."
            )
        where.setdefault(_column(column.strip()), []).append(value)
    return where


def normalised(where: Where | None) -> Conditions:
    """Return a filter as sorted tuples; InputError if it is invalid."""
    if where is None:
        return ()
    check_kind("the filter", where, Mapping, 'a column and its values, such as {"license": "CC0"}')
    conditions: list[tuple[str, tuple[str, ...]]] = []
    for column, values in where.items():
        what = f"the value of {_column(column)}"
        kinds = (list, tuple, set, frozenset)
        several = check_kind(what, [values] if isinstance(values, str) else values, kinds, "text")
        conditions.append((column, tuple(sorted({check_text(what, value) for value in several}))))
    return tuple(sorted(conditions))


def _column(name: str) -> str:
    check_choice("the column of the filter", name, GROUP_COLUMNS)
    return name
