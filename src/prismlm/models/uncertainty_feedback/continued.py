"""Rows without a cache that go on from rows of an earlier call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.models.uncertainty_feedback.call import Call


@dataclass
class Earlier:
    """A call without a cache.

    Attributes:
        call: what it said.
        known: the codes of its tokens, and that of the next position.
    """

    call: Call
    known: Int64[Tensor, "P S_and_1"]


def go_on(
    call: Call,
    codes: Int64[Tensor, "B T"],
    earlier: Earlier,
) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Put the codes of earlier rows to rows that go on from one of them; say which those are.

    A row goes on from the earlier row of its own number if it begins with its tokens and has its
    source or images, else from another such row, as beams that change their order do.

    Args:
        call: the call of the longer rows.
        codes: to begin with.
        earlier: the call before.

    Raises:
        InputError: several rows have a row's first tokens and different codes, and its images
            cannot be told apart by rows.
    """
    length = earlier.call.ids.shape[1]
    if length >= call.ids.shape[1]:
        return codes, None
    begun = (call.ids[:, :length], call.real[:, :length])
    were = (earlier.call.ids, earlier.call.real)
    same = torch.stack([(a[:, None] == b).all(-1) for a, b in zip(begun, were, strict=True)]).all(0)
    found, stays = codes.clone(), torch.zeros_like(codes, dtype=torch.bool)
    held = slice(length + 1)
    for row, matches in enumerate(same.tolist()):
        likely = [other for other, one in enumerate(matches) if one]
        source = _source(row, sorted(likely, key=lambda other: other != row), call, earlier)
        if source is not None:
            found[row, held], stays[row, held] = earlier.known[source], True
    return found, stays


def _source(row: int, likely: list[int], call: Call, earlier: Earlier) -> int | None:
    """Return which of the earlier rows that have a row's tokens it goes on from."""
    new, old = call.beside, earlier.call.beside
    if new.keys() == old.keys() and _by_rows(call) and _by_rows(earlier.call):
        alike = (other for other in likely if _same_beside(new, row, old, other))
        return next(alike, None)
    # Rows keep their places, but for beams, which change them among those of one prompt.
    if not likely or likely[0] == row:
        return next(iter(likely), None)
    if (earlier.known[likely] != earlier.known[likely[0]]).any():
        raise InputError(
            f"row {row} begins with the tokens of rows {likely} of the call before, which have "
            f"different codes, and {', '.join(sorted({*new, *old}))} are not one a row, so that "
            "nobody can tell which of them it goes on from: use a cache, or one prompt at a time."
        )
    return likely[0]


def _by_rows(call: Call) -> bool:
    return all(len(value) == len(call.ids) for value in call.beside.values())


def _same_beside(
    new: Mapping[str, Tensor], row: int, old: Mapping[str, Tensor], other: int
) -> bool:
    return all(torch.equal(new[name][row], old[name][other]) for name in new)
