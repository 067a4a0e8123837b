"""Sequences that are put together when they are first looked at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Deferred(Sequence[T], Generic[T]):
    """A sequence whose length is known, and whose items :meth:`build` makes once."""

    @abstractmethod
    def build(self) -> tuple[T, ...]:
        """Return the items."""

    @cached_property
    def _built(self) -> tuple[T, ...]:
        return self.build()

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
