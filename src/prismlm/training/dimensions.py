"""What one hyper-parameter may be: one of some choices, or a number in a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from prismlm.errors import suggest

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Choices:
    """One of some values.

    Attributes:
        values: at least two, all different.
    """

    values: tuple[Scalar, ...]

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """Every value."""
        return self.values


@dataclass(frozen=True)
class Range:
    """A number from ``low`` to ``high``, both included.

    Attributes:
        low: the least.
        high: the greatest, above ``low``.
        log: whether factors rather than differences are equally likely.
    """

    low: float
    high: float
    log: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return self.low, self.high

    @property
    def whole(self) -> bool:
        """Whether both ends are whole numbers; what is searched is one only if the key takes it."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Dimension: TypeAlias = Choices | Range


def dimension_of(key: str, entry: Any) -> Dimension:
    """Read an entry of ``search.space``: ``[32, 64]``, or ``{low: 1e-4, high: 1e-2, log: true}``.

    Raises:
        ValueError: it is neither, has fewer than two values or an end out of range.
    """
    where = f"space: {key}"
    if isinstance(entry, (list, tuple)):
        return _choices(where, list(entry))
    if isinstance(entry, dict):
        return _range(where, entry)
    raise ValueError(
        f"{where} is {entry!r}; expected a list of choices, or a range such as "
        "{low: 1.0e-4, high: 1.0e-2, log: true}"
    )


def _choices(where: str, values: list[Any]) -> Choices:
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(
                f"{where} has the choice {value!r}; expected numbers, texts, true or false"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} has the choice {value!r}; expected a finite number")
    if len({(type(value), value) for value in values}) < max(2, len(values)):
        raise ValueError(
            f"{where} is {values!r}; expected at least two choices, all different. A fixed value "
            "belongs into the recipe itself"
        )
    return Choices(tuple(values))


def _range(where: str, entry: dict[Any, Any]) -> Range:
    known = ["low", "high", "log"]
    for name in entry:
        if name not in known:
            raise ValueError(
                f"{where} has no {name!r}.{suggest(str(name), known)} Known: {', '.join(known)}"
            )
    low, high = (_number(f"{where}.{name}", entry.get(name)) for name in ("low", "high"))
    log = entry.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"{where}.log is {log!r}; expected true or false")
    if low >= high:
        raise ValueError(f"{where} is empty: low is {low} and high {high}; expected low < high")
    if log and low <= 0:
        raise ValueError(f"{where}.low is {low}; with log: true it has to be above 0")
    return Range(low, high, log)


def _number(where: str, value: Any) -> int | float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}; expected a finite number")
    return value
