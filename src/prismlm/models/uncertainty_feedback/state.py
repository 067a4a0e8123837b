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
    """What a cache carries: the code of the position that comes next.

    Attributes:
        following: that code.
        levels: of the codes.
        length: of the cache when it was added; None where it does not tell.
    """

    following: Int64[Tensor, "B 1"]
    levels: int
    length: int | None

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.following = self.following[rows.to(self.following.device)]

    def check(self, rows: int, levels: int, length: int | None) -> None:
        """Raise InputError for a call of other rows or levels, or a cache of another length."""
        held = {"rows": len(self.following), "levels": self.levels, "positions": self.length}
        now = {"rows": rows, "levels": levels, "positions": length}
        for name, number in held.items():
            if None not in (number, now[name]) and number != now[name]:
                raise InputError(
                    f"the cache carries codes of {number} {name}, and this call has {now[name]}: "
                    "a cache goes on with the same feedback, is not cropped, and its rows are "
                    "chosen by its own methods alone (batch_select_indices, "
                    "batch_repeat_interleave, reorder_cache). Begin anew without it."
                )


class CarriesCodes:
    """Mixed into a cache's class: every change of its rows is made to its codes too."""

    prismlm_codes: CachedCodes | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, as beam search does."""
        self._change("reorder_cache", beam_idx, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Choose rows."""
        self._change("batch_select_indices", indices, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        count = 0 if self.prismlm_codes is None else len(self.prismlm_codes.following)
        rows = torch.arange(count).repeat_interleave(repeats)
        self._change("batch_repeat_interleave", repeats, rows)

    def reset(self) -> None:
        """Forget everything."""
        cache: Any = super()
        cache.reset()
        self.prismlm_codes = None

    def _change(self, method: str, given: Any, rows: Tensor) -> None:
        getattr(super(), method)(given)
        if self.prismlm_codes is not None:
            self.prismlm_codes.select(rows)


@lru_cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (CarriesCodes, kind), {"__module__": kind.__module__})


def codes_of(cache: Any) -> CachedCodes | None:
    """Return what a cache carries, or None if that is nothing yet."""
    return getattr(cache, "prismlm_codes", None)


def carry(cache: Any, following: Int64[Tensor, "B 1"], levels: int) -> None:
    """Let a cache carry the code of the position that comes next."""
    if not isinstance(cache, CarriesCodes):
        cache.__class__ = _carrying(type(cache))
    cache.prismlm_codes = CachedCodes(following, levels, length_of(cache))


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
