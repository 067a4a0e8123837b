"""What uncertainty feedback knows: of a call in a thread, and of the ones before in a cache."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prismlm.errors import InputError


@dataclass(eq=False)
class State:
    """What is known of a thread's call.

    Attributes:
        codes: what is to be added to the input of the decoder; None outside a pass.
        pending: the embeddings that are called next are those of the decoder's input.
        added: whether something was added yet.
        generates: whether ``generate`` calls the model.
    """

    codes: Int64[Tensor, "B T"] | None = None
    pending: bool = False
    added: bool = False
    generates: bool = False


class Threads(threading.local):
    """One state a thread: several may call a model at once.

    The state is an object of its own because what a compiled graph writes into threading.local
    itself is lost.
    """

    def __init__(self) -> None:
        self.state = State()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model begins with nothing; threading.local itself cannot be copied.
        return Threads, ()


@dataclass(eq=False)
class CachedCodes:
    """The codes that were fed to the positions of a cache, and that of the next one.

    Attributes:
        used: of each position, oldest first.
        following: of the position after them.
        levels: of the codes.
        length: of the cache when they were added; None where it does not tell.
    """

    used: Int64[Tensor, "B S"]
    following: Int64[Tensor, "B 1"]
    levels: int
    length: int | None

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        rows = rows.to(self.used.device)
        self.used, self.following = self.used[rows], self.following[rows]

    def crop(self, length: int) -> CachedCodes | None:
        """Return those of the first positions; the next gets what it was fed when it was there.

        None where that is not known: positions from before there was feedback have no codes.
        """
        kept = self.used.shape[1] - ((self.length or self.used.shape[1]) - length)
        if kept < 0:
            return None
        following = self.used[:, kept : kept + 1]
        following = following if following.shape[1] else self.following
        return CachedCodes(self.used[:, :kept], following, self.levels, length)

    def check(self, rows: int, levels: int, length: int | None) -> None:
        """Raise InputError for a call of other rows or levels, or a cache of another length."""
        held = {"rows": len(self.following), "levels": self.levels, "positions": self.length}
        now = {"rows": rows, "levels": levels, "positions": length}
        for name, number in held.items():
            if None not in (number, now[name]) and number != now[name]:
                raise InputError(
                    f"the cache carries codes of {number} {name}, and this call has {now[name]}: "
                    "a cache goes on with the same feedback, and its rows and positions are "
                    "chosen by its own methods alone (batch_select_indices, "
                    "batch_repeat_interleave, reorder_cache, crop). Begin anew without it."
                )


class CarriesCodes:
    """Mixed into a cache's class: every change of its rows is made to its codes too."""

    prismlm_codes: CachedCodes | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, as beam search does."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportAttributeAccessIssue]
        if self.prismlm_codes is not None:
            self.prismlm_codes.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Choose rows."""
        super().batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
        if self.prismlm_codes is not None:
            self.prismlm_codes.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)  # pyright: ignore[reportAttributeAccessIssue]
        if self.prismlm_codes is not None:
            rows = torch.arange(len(self.prismlm_codes.used)).repeat_interleave(repeats)
            self.prismlm_codes.select(rows)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Take positions from the end."""
        cache: Any = super()
        cache.crop(*args, **kwargs)
        if self.prismlm_codes is not None:
            self.prismlm_codes = self.prismlm_codes.crop(int(cache.get_seq_length()))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # pyright: ignore[reportAttributeAccessIssue]
        self.prismlm_codes = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made at run time, so that pickle would not find it.
        return _remade, (type(self).__bases__[1],), self.__dict__


def _remade(kind: type) -> Any:
    made: Any = _carrying(kind)
    return made.__new__(made)


@lru_cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (CarriesCodes, kind), {"__module__": kind.__module__})


def codes_of(cache: Any) -> CachedCodes | None:
    """Return the codes of a cache, or None if it has none yet."""
    return getattr(cache, "prismlm_codes", None)


def carry(
    cache: Any, used: Int64[Tensor, "B T"], following: Int64[Tensor, "B 1"], levels: int
) -> None:
    """Add the codes of new positions to a cache, which carries them from now on."""
    if not isinstance(cache, CarriesCodes):
        cache.__class__ = _carrying(type(cache))
    held: CachedCodes | None = cache.prismlm_codes
    used = used if held is None else torch.cat([held.used, used], 1)
    cache.prismlm_codes = CachedCodes(used, following, levels, length_of(cache))


def length_of(cache: Any) -> int | None:
    """Return how many positions a cache holds, or None where that is not known at no cost."""
    if torch.compiler.is_compiling():
        return None
    try:
        length = cache.get_seq_length()
    except ValueError:
        # Those of recurrent layers alone do not count.
        return None
    return length if isinstance(length, int) else None


def has_seen(cache: Any) -> bool:
    """Say whether a cache holds positions."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:
        # Those of recurrent layers alone do not count.
        return bool(cache.has_previous_state())


class _Detached(TorchFunctionMode):
    """Copies tensors that autograd made, which copy.deepcopy refuses, without their gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def copied(cache: Any) -> Any:
    """Return a copy of a cache that has no gradient."""
    with _Detached():
        return copy.deepcopy(cache)
