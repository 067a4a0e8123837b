"""How often, and how strongly, every prototype is used in each source, domain and licence."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from prismlm.lens.layout import MASS_SCHEMA

# Activations are summed as whole multiples of 2⁻²⁰, so that no order of addition changes a bit.
STEPS_PER_UNIT = 2**20


class MassCounter:
    """Counts uses and sums activations per (group, prototype), exactly and in any order.

    Args:
        groups: one (source, domain, licence) per group.
        prototypes: K.
    """

    def __init__(self, groups: list[tuple[str | None, ...]], prototypes: int) -> None:
        self.groups = groups
        self.prototypes = prototypes
        self.tokens = torch.zeros(len(groups) * prototypes, dtype=torch.int64)
        self.steps = torch.zeros(len(groups) * prototypes, dtype=torch.int64)

    def add(self, group: Tensor, indices: Tensor, activations: Tensor) -> None:
        """Add routed positions: ``group`` [N], ``indices`` and ``activations`` [N, k]."""
        used = activations > 0
        cell = (group[:, None] * self.prototypes + indices)[used]
        steps = (activations[used].double() * STEPS_PER_UNIT).round().long()
        self.tokens.index_add_(0, cell, torch.ones_like(cell))
        self.steps.index_add_(0, cell, steps)

    def usage(self) -> np.ndarray:
        """Return how many positions used each prototype: int64 [K]."""
        return self.tokens.view(len(self.groups), self.prototypes).sum(0).numpy()

    def table(self) -> pa.Table:
        """Return ``mass.parquet``: one row per (prototype, group) that occurs."""
        tokens = self.tokens.view(len(self.groups), self.prototypes).T
        prototype, group = tokens.nonzero().T.numpy()
        steps = self.steps.view(len(self.groups), self.prototypes).T
        columns = [pa.array([self.groups[g][i] for g in group], pa.string()) for i in range(3)]
        return pa.table(
            [
                pa.array(prototype.astype(np.int32)),
                *columns,
                pa.array(tokens[prototype, group].numpy()),
                pa.array(steps[prototype, group].double().numpy() / STEPS_PER_UNIT),
            ],
            schema=MASS_SCHEMA,
        )
