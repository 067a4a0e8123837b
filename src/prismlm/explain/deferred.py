"""Sequences that are put together when they are first looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Deferred(Sequence[T], Generic[T]):
    """So many items, which ``build`` makes once."""

    def __init__(self, count: int, build: Callable[[], tuple[T, ...]]) -> None:
        self._count, self._build = count, build

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _built(self) -> tuple[T, ...]:
        return self._build()

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._built[index]

    def __eq__(self, other: object) -> bool:
        return self._built == (other._built if isinstance(other, Deferred) else other)

    def __hash__(self) -> int:
        return hash(self._built)

    def __repr__(self) -> str:
        return repr(self._built)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._built,)
