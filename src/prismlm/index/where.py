"""Filters on the text behind a prediction: only this source, only these licences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prismlm.errors import InputError, check_choice, check_kind, check_text, suggest
from prismlm.index.layout import GROUP_COLUMNS

if TYPE_CHECKING:
    import numpy as np

UNKNOWN = "(unknown)"
# Values of one column are alternatives; columns must all match.
Where = Mapping[str, str | Sequence[str]]
Conditions = tuple[tuple[str, tuple[str, ...]], ...]


class Keys(NamedTuple):
    """The distinct values of a column, and which of them every row has, int [rows]."""

    names: list[str]
    codes: np.ndarray


def parse_where(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Read ``column=value`` conditions; a column that is named twice may have either value.

    Raises:
        InputError: a condition is not ``column=value``, or there is no such column.
    """
    where: dict[str, list[str]] = {}
    for condition in conditions:
        column, equals, value = condition.partition("=")
        if not equals or not value:
            raise InputError(
                f"the filter {condition!r} cannot be read: expected COLUMN=VALUE, such as "
                "license=CC0."
            )
        where.setdefault(_column(column.strip()), []).append(value)
    return where


def normalised(where: Where | None) -> Conditions:
    """Return a filter in one order, so that equal filters are equal.

    Raises:
        InputError: a column that text cannot be filtered by, or a value that is no text.
    """
    if where is None:
        return ()
    check_kind("the filter", where, Mapping, 'a column and its values, such as {"license": "CC0"}')
    conditions: dict[str, tuple[str, ...]] = {}
    for column, values in where.items():
        value = f"the value of {_column(column)}"
        kinds = (list, tuple, set, frozenset)
        several = check_kind(value, [values] if isinstance(values, str) else values, kinds, "text")
        conditions[column] = tuple(sorted({check_text(value, one) for one in several}))
    return tuple(sorted(conditions.items()))


def check_value(column: str, value: str, known: list[str]) -> None:
    """Raise InputError unless a filter's value is one of those that occur in the lens."""
    if value not in known:
        listed = ", ".join(sorted(known)[:8]) + (" …" if len(known) > 8 else "")
        raise InputError(
            f"no text of this lens has {column}={value}.{suggest(value, known)} "
            f"Known are: {listed}."
        )


def _column(name: str) -> str:
    check_choice("the column of the filter", name, GROUP_COLUMNS)
    return name
