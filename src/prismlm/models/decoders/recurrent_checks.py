"""What settings of recurrent decoders may be, where a wrong one would build another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard, cast

from prismlm.errors import InputError


def check_share(name: str, value: object) -> None:
    """Raise InputError unless 0 ≤ value < 1."""
    if not _is_number(value) or not 0 <= value < 1:
        raise InputError(
            f"{name} is {value!r}: expected a share of at least 0 and below 1; 0 for none."
        )


def check_finite_number(name: str, value: object) -> None:
    """Raise InputError unless a value is a finite number."""
    if not _is_number(value) or not math.isfinite(value):
        raise InputError(f"{name} is {value!r}: expected a finite number.")


def check_layers(name: str, value: object, layers: int, default: tuple[int, ...]) -> None:
    """Raise InputError unless a value lists layers that the model has, or is the default.

    A model of one layer has the defaults of deeper ones too, as its checkpoints say.
    """
    given = _whole_numbers(value)
    if given is None or not (given == default or all(0 <= layer < layers for layer in given)):
        raise InputError(
            f"{name} is {value!r}: expected a list of layers, whole numbers from 0 to "
            f"{layers - 1} for num_hidden_layers {layers}; [] for none."
        )


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers, or None for anything else."""
    if not isinstance(value, list | tuple):
        return None
    given = cast("Sequence[object]", value)
    numbers = tuple(n for n in given if isinstance(n, int) and not isinstance(n, bool))
    return numbers if len(numbers) == len(given) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
