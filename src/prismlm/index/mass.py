"""How often, and how strongly, every prototype is used in each source, domain and licence."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from prismlm import fingerprints
from prismlm.index.layout import MASS_SCHEMA, OTHER

# Activations are summed as whole multiples of 2⁻²⁰, so that no order of addition changes a bit.
STEPS_PER_UNIT = 2**20
# How many (source, domain, licence) keep rows of their own: at K = 2,048, 64 MiB.
LARGEST_GROUPS = 2048
Key = tuple[str | None, ...]


class MassCounter:
    """Counts uses and sums activations per (group, prototype), exactly and in any order.

    At most ``limit`` groups keep rows of their own: those with the smallest hashes of all that
    ever come, so that the order of reading does not matter. The others are summed as source
    "(other)" of their domain and licence, and where even these are too many, as "(other)" in all
    three. Memory is thus set by K, whatever the corpus.

    Args:
        prototypes: K.
        limit: groups that keep rows of their own, for each of the two levels.
    """

    def __init__(self, prototypes: int, limit: int = LARGEST_GROUPS) -> None:
        self.prototypes = prototypes
        self.limit = limit
        self._rows: dict[Key, Tensor] = {}
        self._order: dict[int, dict[Key, str]] = {0: {}, 1: {}}

    @property
    def rows(self) -> dict[Key, Tensor]:
        """Each group's uses and steps, int64 [2, K], sorted by group."""
        order = sorted(self._rows, key=lambda key: [(part is not None, part or "") for part in key])
        return {key: self._rows[key] for key in order}

    def add(self, keys: list[Key], key: Tensor, indices: Tensor, activations: Tensor) -> None:
        """Add routed positions.

        Args:
            keys: the groups that ``key`` counts in.
            key: the group of each position, int64 [N].
            indices: the prototypes routed to, int64 [N, k].
            activations: of those, float32 [N, k]; those that are not positive are no use.
        """
        present, row = key.unique(return_inverse=True)
        cell = (row[:, None] * self.prototypes + indices).flatten()
        positive = activations.clamp_min(0).flatten()
        sums = torch.zeros(2, len(present) * self.prototypes, dtype=torch.int64)
        sums[0].index_add_(0, cell, (positive > 0).long())
        sums[1].index_add_(0, cell, (positive.double() * STEPS_PER_UNIT).round_().long())
        shaped = sums.view(2, len(present), self.prototypes)
        for place, number in enumerate(present.tolist()):
            self._put(keys[number], shaped[:, place])

    def merge(self, rows: dict[Key, Tensor]) -> None:
        """Add the rows of another counter of the same K and limit."""
        for key, sums in rows.items():
            self._put(key, sums)

    def _put(self, key: Key, sums: Tensor) -> None:
        if key not in self._rows and key != (OTHER, OTHER, OTHER):
            kept = self._order[int(key[0] == OTHER)]
            kept[key] = fingerprints.of_json(list(key))
            if len(kept) > self.limit:
                last = max(kept, key=lambda other: kept[other])
                del kept[last]
                evicted = self._rows.pop(last, None)
                if evicted is not None:
                    self._put(_parent(last), evicted)
                if last == key:
                    self._put(_parent(key), sums)
                    return
        if key in self._rows:
            self._rows[key] += sums
        else:
            self._rows[key] = sums.clone()

    def usage(self) -> np.ndarray:
        """Return how many positions used each prototype: int64 [K]."""
        total = torch.zeros(self.prototypes, dtype=torch.int64)
        for sums in self._rows.values():
            total += sums[0]
        return total.numpy()

    def table(self) -> pa.Table:
        """Return ``mass.parquet``: one row per (prototype, group) that occurs."""
        rows = self.rows
        keys = list(rows)
        sums = torch.stack(list(rows.values()), 2) if rows else torch.zeros(2, self.prototypes, 0)
        prototype, group = sums[0].nonzero().T.numpy()
        columns = [
            pa.DictionaryArray.from_arrays(
                pa.array(group.astype(np.int32)), pa.array([key[i] for key in keys], pa.string())
            ).cast(pa.string())
            for i in range(3)
        ]
        return pa.table(
            [
                pa.array(prototype.astype(np.int32)),
                *columns,
                pa.array(sums[0][prototype, group].long().numpy()),
                pa.array(sums[1][prototype, group].double().numpy() / STEPS_PER_UNIT),
            ],
            schema=MASS_SCHEMA,
        )


def _parent(key: Key) -> Key:
    return (OTHER, OTHER, OTHER) if key[0] == OTHER else (OTHER, *key[1:])
