"""Filters on the text behind a prediction: only this source, only these licences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prismlm.errors import InputError, suggest
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
        InputError: a column that text cannot be filtered by.
    """
    conditions = {
        _column(column): (values,) if isinstance(values, str) else tuple(sorted(set(values)))
        for column, values in (where or {}).items()
    }
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
    known: list[str] = list(GROUP_COLUMNS)
    if name not in known:
        raise InputError(
            f"text can be filtered by {', '.join(known[:-1])} and {known[-1]}; not by {name!r}."
            f"{suggest(name, known)}"
        )
    return name
