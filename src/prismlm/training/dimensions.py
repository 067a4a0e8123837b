"""What one hyper-parameter may be: one of some choices, or a number in a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from prismlm.errors import InputError, check_kind, check_number, suggest

Scalar: TypeAlias = bool | int | float | str


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
    def whole(self) -> bool:
        """Whether both ends are whole numbers; what is searched is one only if the key takes it."""
        return isinstance(self.low, int) and isinstance(self.high, int)


# Choices are at least two, all different.
Dimension: TypeAlias = tuple[Scalar, ...] | Range


def ends_of(dimension: Dimension) -> tuple[Scalar, ...]:
    """Return the least and the greatest value of a range, or every choice."""
    return (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension


def dimension_of(key: str, entry: Any) -> Dimension:
    """Read an entry of ``search.space``: ``[32, 64]``, or ``{low: 1e-4, high: 1e-2, log: true}``.

    Raises:
        InputError: it is neither, has fewer than two values or an end out of range.
    """
    where = f"space: {key}"
    if isinstance(entry, (list, tuple)):
        return _choices(where, tuple(entry))
    expected = "a list of choices, or a range such as {low: 1.0e-4, high: 1.0e-2, log: true}"
    return _range(where, check_kind(where, entry, dict, expected))


def _choices(where: str, values: tuple[Any, ...]) -> tuple[Scalar, ...]:
    for value in values:
        choice = f"{where} has a choice that"
        check_kind(choice, value, (bool, int, float, str), "a number, a text, true or false")
        if isinstance(value, float):
            check_number(choice, value, "a finite number")
    if len({(type(value), value) for value in values}) < max(2, len(values)):
        raise InputError(
            f"{where} is {list(values)!r}; expected at least two choices, all different. A fixed "
            "value belongs into the recipe itself."
        )
    return values


def _range(where: str, entry: dict[Any, Any]) -> Range:
    known = ["low", "high", "log"]
    for name in entry:
        if name not in known:
            raise InputError(
                f"{where} has no {name!r}.{suggest(str(name), known)} Known: {', '.join(known)}."
            )
    given: dict[str, Any] = {"low": None, "high": None, "log": False} | entry
    low, high, log = given["low"], given["high"], given["log"]
    check_number(f"{where}.low", low, "a finite number")
    check_number(f"{where}.high", high, "a finite number")
    check_kind(f"{where}.log", log, bool, "true or false")
    if low >= high:
        raise InputError(f"{where} is empty: low is {low} and high {high}; expected low < high.")
    if log and low <= 0:
        raise InputError(f"{where}.low is {low}; with log: true it has to be above 0.")
    return Range(low, high, log)
